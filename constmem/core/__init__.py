"""States and their algebra: what every model of this library remembers."""
