"""Models behind an address: the page that learns in the browser."""
