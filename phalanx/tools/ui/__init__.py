"""The dashboard: runs read as columns, a web server on them, and the same page as one file. Nothing here is written."""
