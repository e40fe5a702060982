"""Tools that look at runs or run many of them: each a package with its verb. The core never imports one."""
