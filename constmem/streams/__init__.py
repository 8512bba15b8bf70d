"""Streams: one, and any number of them by key; the only objects here that change."""
