"""Expert iteration: search, verify, bridge from hinted rationales, and keep solutions to distil (paper section 3)."""
