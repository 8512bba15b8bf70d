"""Scores, rows, tables and pictures of runs."""
