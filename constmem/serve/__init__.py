"""Streams as a service: over HTTP, and from where rows come; what it has acknowledged is kept."""
