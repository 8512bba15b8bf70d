"""Scores of points and events, rows, tables and pictures of runs."""
