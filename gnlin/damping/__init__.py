r"""Rules that adapt Levenberg-Marquardt's damping to the success of its trials.

```python
solver = gnlin.LevenbergMarquardt(damping=gnlin.damping.TrustRegion())
```

For a fixed damping or a schedule use [`gnlin.DampedGaussNewton`][].
"""

from ._base import AbstractDamping, Trial
from ._longest_step import LongestStep
from ._nielsen import Nielsen
from ._trust_region import TrustRegion


__all__ = ["AbstractDamping", "LongestStep", "Nielsen", "Trial", "TrustRegion"]
