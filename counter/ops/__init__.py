"""Audits, backups, moving counts, planning, and the doctor, for operators."""
