"""Audits, moving counts, planning, and the doctor, for operators."""
