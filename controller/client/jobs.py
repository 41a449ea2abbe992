"""A job over REST: sent once, followed until it is over."""

import uuid
from collections.abc import Iterator

from controller.api.schemas import BundleView, JobView
from controller.client.pack import Bundle
from controller.client.rest import Controller, job_path
from controller.core.jobspec import JobSpec


def send(controller: Controller, spec: JobSpec, bundle: Bundle | None) -> JobView:
    """The bundle, then the job, once however often it is tried."""
    if bundle:
        controller.put(f"/api/v1/bundles/{bundle.digest}", bundle.content, BundleView)
    body = {"spec": spec.model_dump(mode="json")}
    return controller.post("/api/v1/jobs", body, JobView, key=str(uuid.uuid4()))


def changes(controller: Controller, job: str) -> Iterator[JobView]:
    """The job now, and again whenever the stream says that something moved, until it is over."""
    view = controller.get(job_path(job), JobView)
    yield view
    if view.state.is_over:
        return
    for message in controller.stream(job=view.id):
        if message.event not in ("hello", "job", "tick", "reset"):
            continue
        if message.event == "job":
            view = JobView.model_validate_json(message.data)
        else:
            view = controller.get(job_path(view.id), JobView)
        yield view
        if view.state.is_over:
            return
