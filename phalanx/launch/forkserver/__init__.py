"""The fork server: a process that has imported torch, from which ranks are forked."""
