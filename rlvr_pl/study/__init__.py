"""Studies: matched arms over seeds from one start, with the rule and the expectations written down beforehand."""
