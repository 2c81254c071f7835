"""The verifiers under their public name, which reward functions import; the code is in `memrl/scoring/verify.py`."""

from memrl.scoring.verify import last_boxed, lenient_match, strict_match, token_f1

__all__ = ["last_boxed", "lenient_match", "strict_match", "token_f1"]
