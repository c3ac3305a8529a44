"""Log-ratio statistics for the trainers of TRL: GRPO, RLOO and AsyncGRPO (extra ``pyrlstats[trl]``).

One line before ``trainer.train()``::

    from pyrlstats.integrations.trl import attach

    handle = attach(trainer)

From then on the dictionary that TRL hands to its loggers holds ``rl/<ratio>/<slice>/<statistic>``. Three ratios are
kept apart: :data:`RATIOS`. Nothing of TRL is imported or copied: methods of the one trainer are wrapped, and
``handle.detach()`` takes the wrappers off.
"""

from pyrlstats.integrations.trl.attachment import STATISTICS, Attachment, attach
from pyrlstats.integrations.trl.families import FAMILIES, Family
from pyrlstats.integrations.trl.tokens import RATIOS, Tokens

__all__ = ["FAMILIES", "RATIOS", "STATISTICS", "Attachment", "Family", "Tokens", "attach"]
