"""A costs file of either kind, as text: layers as a calibration writes them, or stages. PURE."""

from pydantic import ValidationError
from pydantic_core import from_json

from controller.planner.stagefile import StageFile
from trainer.contract.costs import LayerCosts


def read_costs(text: str) -> LayerCosts | StageFile:
    """Raises ValueError with one sentence that says what is wrong."""
    try:
        given = from_json(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(given, dict) or not {"stages", "layers"} & given.keys():
        raise ValueError('it holds neither "layers" (from `varuna profile`) nor "stages"')
    kind = StageFile if "stages" in given else LayerCosts
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {what}" if where else what) from None
