//! What a server must refuse, by the protocol alone: judged from the bytes of a message, and from
//! nothing that the server under test has in common with others.

use super::Attack;
use farlane_vfio_user::wire::{self, Command, HEADER_BYTES};
use zerocopy::{FromBytes, Immutable, KnownLayout};

/// Regions of a PCI device (`VFIO_PCI_NUM_REGIONS`), and kinds of its interrupts
/// (`VFIO_PCI_NUM_IRQS`).
const REGIONS: u32 = 9;
const INTERRUPTS: u32 = 5;
/// Longest transfer that a server grants unless it says otherwise (`max_data_xfer_size`).
const MAX_TRANSFER: u32 = 1 << 20;

/// Whether a message is certainly invalid. Of many others nobody can say that who does not know the
/// device.
#[must_use]
pub fn is_invalid(attack: &Attack) -> bool {
    let body = attack.bytes.get(HEADER_BYTES..).unwrap_or(&[]);
    let Some(command) = Command::from_wire(attack.command) else {
        return true;
    };
    match command {
        Command::Version => {
            let text = body.get(size_of::<wire::Version>()..).unwrap_or(&[]);
            // There has been one already, and it is no text.
            text.last().is_some_and(|&last| last != 0) || body.len() < size_of::<wire::Version>()
        }
        Command::DmaMap => told(body, |map: &wire::DmaMap| {
            short(map.argsz, map)
                || map.size == 0
                || map.address.checked_add(map.size - 1).is_none()
                || map.flags & !(wire::DMA_READ | wire::DMA_WRITE) != 0
        }),
        Command::DmaUnmap => told(body, |unmap: &wire::DmaUnmap| {
            let all = unmap.flags & wire::UNMAP_ALL != 0;
            short(unmap.argsz, unmap)
                || all && (unmap.address, unmap.size) != (0, 0)
                || !all && unmap.size == 0
        }),
        Command::DeviceGetInfo => told(body, |info: &wire::DeviceInfo| short(info.argsz, info)),
        Command::DeviceGetRegionInfo => told(body, |info: &wire::RegionInfo| {
            short(info.argsz, info) || info.index >= REGIONS
        }),
        Command::DeviceGetRegionIoFds => told(body, |ask: &wire::RegionIoFds| {
            short(ask.argsz, ask) || ask.index >= REGIONS
        }),
        Command::DeviceGetIrqInfo => told(body, |info: &wire::IrqInfo| {
            short(info.argsz, info) || info.index >= INTERRUPTS
        }),
        Command::DeviceSetIrqs => told(body, |set: &wire::IrqSet| {
            short(set.argsz, set)
                || set.index >= INTERRUPTS
                || set.start.checked_add(set.count).is_none()
        }),
        Command::RegionRead => told(body, |access: &wire::RegionAccess| {
            access.region >= REGIONS || access.count > MAX_TRANSFER
        }),
        Command::RegionWrite => told(body, |access: &wire::RegionAccess| {
            let data = body.len() - size_of::<wire::RegionAccess>();
            access.region >= REGIONS
                || usize::try_from(access.count).is_ok_and(|count| count > data)
        }),
        Command::RegionWriteMulti => told(body, |multi: &wire::WriteMulti| {
            let entries = body.len() - size_of::<wire::WriteMulti>();
            let fit = entries / size_of::<wire::WriteOne>();
            usize::try_from(multi.wr_cnt).map_or(true, |count| count > fit)
        }),
        // A server asks those of a client.
        Command::DmaRead | Command::DmaWrite => true,
        // A body says nothing about a reset, and the rest has to be agreed on first.
        Command::DeviceReset => false,
        Command::DirtyPages
        | Command::DeviceFeature
        | Command::MigDataRead
        | Command::MigDataWrite => true,
    }
}

/// Whether a body is too short for its structure, or what that says is wrong.
fn told<T: FromBytes + Immutable + KnownLayout>(body: &[u8], wrong: impl Fn(&T) -> bool) -> bool {
    T::read_from_prefix(body).map_or(true, |(told, _)| wrong(&told))
}

/// `argsz` has no room for the structure that it belongs to.
fn short<T>(argsz: u32, _: &T) -> bool {
    usize::try_from(argsz).is_ok_and(|argsz| argsz < size_of::<T>())
}

#[cfg(test)]
mod tests {
    use super::super::Stream;
    use super::*;
    use zerocopy::IntoBytes as _;

    fn message(command: u16, body: &[u8]) -> Attack {
        Attack {
            command,
            bytes: [&[0; HEADER_BYTES], body].concat(),
            fds: Vec::new(),
            stream: Stream::InStep,
        }
    }

    #[test]
    fn what_is_right_is_not_called_invalid() {
        let map = wire::DmaMap {
            argsz: 32,
            flags: wire::DMA_READ,
            offset: 0,
            address: 0x1000,
            size: 0x1000,
        };
        let good =
            |map: wire::DmaMap| !is_invalid(&message(Command::DmaMap.to_wire(), map.as_bytes()));
        assert!(good(map));
        assert!(!good(wire::DmaMap { argsz: 31, ..map }));
        assert!(!good(wire::DmaMap { size: 0, ..map }));
        assert!(!good(wire::DmaMap { flags: 8, ..map }));
        assert!(!good(wire::DmaMap {
            address: u64::MAX,
            ..map
        }));
        assert!(good(wire::DmaMap {
            address: u64::MAX,
            size: 1,
            ..map
        }));
        assert!(is_invalid(&message(
            Command::DmaMap.to_wire(),
            &map.as_bytes()[..31]
        )));
        assert!(!is_invalid(&message(Command::DeviceReset.to_wire(), &[])));
        assert!(is_invalid(&message(0, &[])) && is_invalid(&message(19, &[])));
    }
}
