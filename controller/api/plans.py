"""``POST /plans``: what so many nodes would get. Asks the planner, stores nothing."""

import asyncio

from fastapi import APIRouter

from controller.api import schemas
from controller.api.deps import Here
from controller.api.errors import ProblemException, StrictRoute
from controller.api.planned import table
from controller.store.known import known_costs

router = APIRouter(prefix="/api/v1/plans", tags=["plans"], route_class=StrictRoute)


@router.post("")
async def plans(here: Here, asked: schemas.PlansRequest) -> schemas.PlansView:
    """The planner's table; 409 while nobody has measured the program."""
    costs, origin = asked.costs, "the request"
    if costs is None:
        with here.store.read() as connection:
            found = known_costs(connection, asked.spec)
        if found is None:
            raise ProblemException(
                409,
                "Nobody has measured this program yet: give `costs` (`varuna profile` measures"
                " them), or submit the job, whose first launch does.",
            )
        origin, costs = found
    try:
        return await asyncio.to_thread(table, asked, costs, origin)
    except ValueError as error:
        raise ProblemException(422, f"{error}.") from None
