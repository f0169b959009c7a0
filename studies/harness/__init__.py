"""What the studies share: runs as processes of their own, what is kept of them, and tables written into a page."""
