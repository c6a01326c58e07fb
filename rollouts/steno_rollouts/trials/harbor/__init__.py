"""Trials in sandboxes of Harbor, by an interpreter that has it."""
