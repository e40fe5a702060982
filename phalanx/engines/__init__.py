"""Foreign engines, one folder each: launcher, strategy, trainer, data and tuning backend of that engine."""

import phalanx.config  # noqa: F401  its tables load the declarations, which must not be half loaded then
