"""Checks and known misconceptions, one module per chapter; `oracle` holds the exact arithmetic they compare with."""
