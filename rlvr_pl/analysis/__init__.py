"""The analysis commands, one file each; every one starts without torch unless its job needs it."""
