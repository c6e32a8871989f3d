"""What this package calls of an engine."""

NEEDED_CALLS = (
    "/abort_request",
    "/begin_weight_update",
    "/continue_generation",
    "/destroy_weights_update_group",
    "/end_weight_update",
    "/flush_cache",
    "/generate",
    "/health",
    "/init_weights_update_group",
    "/model_info",
    "/pause_generation",
    "/ready",
    "/server_info",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/v1/loads",
    "/weights_checker",
)
