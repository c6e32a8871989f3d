"""What can go wrong with a session, by name: the same names on the wire and in the client."""

from __future__ import annotations


class SessionError(RuntimeError):
    """A call about a session failed. `kind` is its name on the wire."""

    kind = "internal"
    status = 500


class SessionLost(SessionError):
    """The instance does not know the session, was restarted, or is gone: the whole exchange is to be redone."""

    kind = "session_lost"
    status = 404


class InvalidRequest(SessionError):
    """The request is not one that can be served."""

    kind = "invalid_request"
    status = 400


class Unauthorized(SessionError):
    """The caller did not send the run's key."""

    kind = "unauthorized"
    status = 401


class HistoryDiverged(InvalidRequest):
    """The messages do not continue those of the session."""

    kind = "history_diverged"


class TurnInFlight(SessionError):
    """Another turn of the session is being generated."""

    kind = "turn_in_flight"
    status = 409


class NoTurns(SessionError):
    """There is nothing to make a sample of."""

    kind = "no_turns"
    status = 422


class TemplateNotAppendable(SessionError):
    """The chat template renders a conversation differently when it goes on, so stored tokens cannot be continued."""

    kind = "template_not_appendable"


class UpstreamUnavailable(SessionError):
    """No engine answered until the deadline."""

    kind = "upstream_unavailable"
    status = 503


KINDS: dict[str, type[SessionError]] = {
    error.kind: error
    for error in (
        SessionError,
        SessionLost,
        InvalidRequest,
        Unauthorized,
        HistoryDiverged,
        TurnInFlight,
        NoTurns,
        TemplateNotAppendable,
        UpstreamUnavailable,
    )
}
