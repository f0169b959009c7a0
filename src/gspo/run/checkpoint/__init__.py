"""Everything a resumed run needs, whole on disk or not there."""
