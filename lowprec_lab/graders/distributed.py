"""Checks and known misconceptions of chapter 14."""
