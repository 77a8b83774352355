"""Operators' work: audits, backups, moving counts, planning, and the doctor."""
