//! Names of events.

use crate::sys::rdma_cm_event_type;
use std::ffi::{CStr, c_char};

/// By their numbers.
const EVENTS: [&CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

/// `rdma_event_str`.
#[must_use]
pub fn event(kind: rdma_cm_event_type) -> *const c_char {
    let name = usize::try_from(kind).ok().and_then(|kind| EVENTS.get(kind));
    name.copied().unwrap_or(c"UNKNOWN EVENT").as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::RDMA_CM_EVENT_ESTABLISHED;

    #[test]
    fn an_event_has_its_name_and_a_number_that_is_none_has_one() {
        // SAFETY: names are constants.
        let name = |kind| unsafe { CStr::from_ptr(event(kind)) };
        assert_eq!(name(RDMA_CM_EVENT_ESTABLISHED), EVENTS[9]);
        assert_eq!(name(99), c"UNKNOWN EVENT");
    }
}
