"""Pure maths on tensors and arrays: no I/O, no Lightning, no transformers."""
