def correct(completions, answer, **kwargs):
    return [float("\\boxed{" + gold + "}" in text) for text, gold in zip(completions, answer)]
