"""Reports: one self-contained page of a run or a study, in which every number names the command that makes it again."""
