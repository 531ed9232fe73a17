//! On-demand paging, where registered memory need be there only when it is used.

use farlane_abi::rdma::{
    DEVICE_FLUSH_GLOBAL, DEVICE_XRC, DeviceLimits, ODP_ATOMIC, ODP_FLUSH, ODP_IMPLICIT, ODP_READ,
    ODP_RECV, ODP_SEND, ODP_SRQ_RECV, ODP_SUPPORT, ODP_WRITE,
};
use farlane_abi::zerocopy::little_endian::U32;

/// Says in a device's limits that every operation that it has works on such memory.
pub(super) fn announce(limits: &mut DeviceLimits) {
    let when = |bit: u32, has: bool| if has { bit } else { 0 };
    let has = |limit: U32| limit.get() != 0;
    let shared = when(ODP_SRQ_RECV, has(limits.max_srq));
    let unreliable = ODP_SEND | ODP_RECV | ODP_WRITE | shared;
    let has_flag = |flag| limits.device_cap_flags.get() & flag != 0;
    let reliable = unreliable
        | ODP_READ
        | when(ODP_ATOMIC, has(limits.atomic_cap))
        | when(ODP_FLUSH, has_flag(DEVICE_FLUSH_GLOBAL));
    let extended = when(reliable, has_flag(DEVICE_XRC));
    limits.odp_general_caps = (ODP_SUPPORT | ODP_IMPLICIT).into();
    limits.odp_rc_caps = reliable.into();
    limits.odp_uc_caps = unreliable.into();
    limits.odp_ud_caps = when(ODP_SEND | ODP_RECV | shared, has(limits.max_ah)).into();
    limits.odp_xrc_caps = extended.into();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_does_not_have_works_on_no_memory() {
        let mut limits = DeviceLimits::default();
        announce(&mut limits);
        let plain = ODP_SEND | ODP_RECV | ODP_WRITE;
        assert_eq!(limits.odp_rc_caps.get(), plain | ODP_READ);
        assert_eq!(limits.odp_uc_caps.get(), plain);
        assert_eq!(
            (limits.odp_ud_caps.get(), limits.odp_xrc_caps.get()),
            (0, 0)
        );

        let mut limits = DeviceLimits {
            max_srq: 1.into(),
            max_ah: 1.into(),
            atomic_cap: 1.into(),
            device_cap_flags: (DEVICE_XRC | DEVICE_FLUSH_GLOBAL).into(),
            ..DeviceLimits::default()
        };
        announce(&mut limits);
        let all = plain | ODP_READ | ODP_ATOMIC | ODP_SRQ_RECV | ODP_FLUSH;
        assert_eq!(limits.odp_rc_caps.get(), all);
        assert_eq!(limits.odp_xrc_caps.get(), all);
        assert_eq!(limits.odp_uc_caps.get(), plain | ODP_SRQ_RECV);
        assert_eq!(limits.odp_ud_caps.get(), ODP_SEND | ODP_RECV | ODP_SRQ_RECV);
    }
}
