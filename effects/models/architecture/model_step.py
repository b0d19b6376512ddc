"""What a forward pass is about, as its layers get it."""

from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.ranks import Communicator

if TYPE_CHECKING:
    from minfer.effects.models.architecture.batch import Batch


@frozen(eq=False)
class ModelStep:
    """One packed step of a model."""

    batch: "Batch"
    cache: PagedCache
    communicator: Communicator  # of the ranks that run it, each with its part
    products: ProductContext
