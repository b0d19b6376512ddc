"""Models outside the family table: transformers' own classes over minfer's paged cache.

transformers looks its attention up by name. The one registered here (paged.py) writes to
minfer's cache and reads through block tables; the rows of a step are packed as one
sequence. A model that does more with attention would be silently wrong, so it is checked
twice: traced without weights (tracing.py: which layers attend, with what heads, masks and
extras), and, once loaded (loading.py), run on packed chunks, whose logits must be those
of its own attention (self_check.py).
"""

from minfer.effects.models.fallback.classes import quiet as quiet
from minfer.effects.models.fallback.loading import load_fallback as load_fallback
from minfer.effects.models.fallback.tracing import fallback_spec as fallback_spec
