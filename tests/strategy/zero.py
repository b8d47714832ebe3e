"""DeepSpeed's strategy, with what it would import late loaded here already: forked ranks would each
do it anew, for seconds.
"""

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

from lightrft.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
