"""Every objective on one task at equal compute, and the clip range that sets itself at three response lengths."""
