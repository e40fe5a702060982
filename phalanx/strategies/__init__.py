"""How ranks are kept in step; one file per strategy."""
