"""Models behind an address: streams by key over HTTP, and the page that learns in the browser."""
