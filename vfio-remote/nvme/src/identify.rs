//! What a controller says about itself (NVMe 1.4, 5.15) and what has happened to it (5.14).

use crate::bits::{Status, log_page};
use crate::counters::Counters;
use crate::error_log::{self, ErrorLog};
use crate::features::Features;
use crate::ids::NamespaceId;
use crate::namespace::{Namespace, Storage};
use crate::uuid::Names;
use farlane_abi::width::to_usize;
use farlane_sys::log_limit::LogLimit;
use std::sync::atomic::Ordering;

/// Data transfer size: at most 2^8 pages, 1 MiB (MDTS).
pub const MAX_TRANSFER_SHIFT: u8 = 8;
/// Asynchronous event requests that are held.
pub const MAX_EVENT_REQUESTS: usize = 4;
/// PCI vendor: 1234 belongs to nobody; emulated devices use it.
pub const VENDOR: u16 = 0x1234;
/// PCI device.
pub const DEVICE: u16 = 0xfa1e;
const ERROR_ENTRIES: u8 = 63;
const _: () = assert!(ERROR_ENTRIES as usize + 1 == error_log::ENTRIES);
const MODEL: &str = "Farlane NVMe";
/// Kelvin.
const TEMPERATURE: u16 = 300;
const TEMPERATURE_WARNING: u16 = 343;
const TEMPERATURE_CRITICAL: u16 = 373;

/// The parts of a controller that never change.
#[derive(Debug)]
pub struct Identity {
    /// Its serial number, and what else its identifiers are made of.
    pub names: Names,
    /// All namespaces; the first is number 1.
    pub namespaces: Vec<Namespace>,
    /// I/O queue pairs.
    pub io_queues: u16,
    /// Limits log lines that a driver can cause.
    pub limit: LogLimit,
}

/// Copies bytes to an offset, where they fit.
pub fn put(data: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = data.get_mut(at..).and_then(|d| d.get_mut(..bytes.len())) {
        place.copy_from_slice(bytes);
    }
}

/// ASCII, padded with spaces (1.5).
fn put_text(data: &mut [u8], at: usize, length: usize, text: &str) {
    let mut padded = vec![b' '; length];
    for (place, byte) in padded.iter_mut().zip(text.bytes()) {
        *place = byte;
    }
    put(data, at, &padded);
}

impl Identity {
    /// A namespace, by its identifier.
    pub fn namespace(&self, nsid: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(to_usize(nsid.index()?.into()))
    }

    /// All namespaces with their identifiers, in order.
    pub fn numbered(&self) -> impl Iterator<Item = (NamespaceId, &Namespace)> {
        (1..).map(NamespaceId::new).zip(&self.namespaces)
    }

    /// Features as after a reset.
    pub fn default_features(&self) -> Features {
        Features::new(self.io_queues, self.count(), self.has_write_cache())
    }

    /// How many namespaces there are: the highest identifier.
    fn count(&self) -> u32 {
        self.numbered().last().map_or(0, |(nsid, _)| nsid.get())
    }

    /// Whether something has to be flushed to be durable.
    pub fn has_write_cache(&self) -> bool {
        self.namespaces
            .iter()
            .any(|n| matches!(n.storage, Storage::Ring { .. }) && !n.read_only)
    }

    /// The answer to Identify: 4096 bytes.
    pub fn identify(&self, what: u8, nsid: NamespaceId) -> Result<Vec<u8>, Status> {
        let known = |nsid| self.namespace(nsid).ok_or(Status::INVALID_NAMESPACE);
        match what {
            0x00 => Ok(Self::describe(known(nsid)?)),
            0x01 => Ok(self.describe_controller()),
            0x02 => {
                // Nothing comes after these two.
                if nsid.get() >= NamespaceId::ALL.get() - 1 {
                    return Err(Status::INVALID_NAMESPACE);
                }
                let mut data = vec![0; 4096];
                let active = self.numbered().filter(|&(id, _)| id > nsid);
                for (at, (id, _)) in (0..4096).step_by(4).zip(active) {
                    put(&mut data, at, &id.get().to_le_bytes());
                }
                Ok(data)
            }
            0x03 => {
                known(nsid)?;
                let mut data = vec![0; 4096];
                // Type 3, UUID, 16 bytes (figure 249), and no other: NGUID and EUI64 belong to who
                // has a company identifier of the IEEE.
                put(&mut data, 0, &[3, 16]);
                put(&mut data, 4, &self.names.uuid(Some(nsid)).0);
                Ok(data)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Identify Controller (figure 247).
    fn describe_controller(&self) -> Vec<u8> {
        let mut data = vec![0; 4096];
        put(&mut data, 0, &VENDOR.to_le_bytes());
        put(&mut data, 2, &VENDOR.to_le_bytes());
        put_text(&mut data, 4, 20, &self.names.serial);
        put_text(&mut data, 24, 40, MODEL);
        put_text(&mut data, 64, 8, env!("CARGO_PKG_VERSION"));
        put(&mut data, 77, &[MAX_TRANSFER_SHIFT]);
        put(&mut data, 80, &0x0001_0400_u32.to_le_bytes());
        // An I/O controller.
        put(&mut data, 111, &[1]);
        // OACS: Doorbell Buffer Config.
        put(&mut data, 256, &0x0100_u16.to_le_bytes());
        // Abort limit and event limit, zero-based. An abort is done at once: there is never a
        // second one under way.
        put(&mut data, 258, &[3, 3]);
        // One firmware slot, read-only. Log pages: effects, extended data; none of a namespace.
        // Entries of the error log, zero-based.
        put(&mut data, 260, &[0b011, 0b110, ERROR_ENTRIES]);
        put(&mut data, 266, &TEMPERATURE_WARNING.to_le_bytes());
        put(&mut data, 268, &TEMPERATURE_CRITICAL.to_le_bytes());
        // Entries of 64 and 16 bytes.
        put(&mut data, 512, &[0x66, 0x44]);
        put(&mut data, 516, &self.count().to_le_bytes());
        // ONCS: Compare, Dataset Management, Write Zeroes, Select, Timestamp.
        put(&mut data, 520, &0x005d_u16.to_le_bytes());
        // VWC: there may be a cache; Flush takes all namespaces at once.
        put(&mut data, 525, &[0b110 | u8::from(self.has_write_cache())]);
        // SGLS: supported; bit buckets; lists longer than the data.
        put(&mut data, 536, &0x0005_0001_u32.to_le_bytes());
        // SUBNQN, the form for who has a UUID (7.9): Linux refuses a second controller of the same
        // name.
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:{}", self.names.uuid(None));
        put(&mut data, 768, name.as_bytes());
        // Power state 0: 25 W, in hundredths.
        put(&mut data, 2048, &2500_u16.to_le_bytes());
        data
    }

    /// Identify Namespace (figure 245).
    fn describe(namespace: &Namespace) -> Vec<u8> {
        let mut data = vec![0; 4096];
        let blocks = namespace.blocks.to_le_bytes();
        for at in [0, 8, 16] {
            put(&mut data, at, &blocks);
        }
        // DLFEAT: blocks given back read as zeroes, and Write Zeroes may give back.
        put(&mut data, 33, &[0b1001]);
        let bytes = u128::from(namespace.blocks) << namespace.block_size.shift();
        put(&mut data, 48, &bytes.to_le_bytes());
        put(&mut data, 99, &[u8::from(namespace.read_only)]);
        // LBADS of the only format.
        put(
            &mut data,
            130,
            &namespace.block_size.shift().to_le_bytes()[..1],
        );
        data
    }
}

/// The sources of the log pages.
#[derive(Clone, Copy, Debug)]
pub struct Logs<'a> {
    /// Errors with commands or doorbells.
    pub errors: &'a ErrorLog,
    /// Whether what was written to some namespace may have been lost.
    pub degraded: bool,
    /// Counters.
    pub counters: &'a Counters,
}

impl Logs<'_> {
    /// A whole log page.
    pub fn page(&self, page: u8) -> Result<Vec<u8>, Status> {
        match page {
            log_page::ERRORS => Ok(self.errors.page()),
            log_page::SMART => Ok(self.smart()),
            log_page::FIRMWARE => {
                let mut data = vec![0; 512];
                // Slot 1 is active.
                put(&mut data, 0, &[1]);
                put_text(&mut data, 8, 8, env!("CARGO_PKG_VERSION"));
                Ok(data)
            }
            log_page::EFFECTS => Ok(Self::effects()),
            _ => Err(Status::INVALID_LOG_PAGE),
        }
    }

    /// Figure 196.
    fn smart(&self) -> Vec<u8> {
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let c = self.counters;
        let mut data = vec![0; 512];
        // Critical warning: reliability is degraded.
        put(&mut data, 0, &[u8::from(self.degraded) << 2]);
        put(&mut data, 1, &TEMPERATURE.to_le_bytes());
        // Available spare and its threshold, percent.
        put(&mut data, 3, &[100, 10]);
        // Thousands of 512 bytes.
        let units = |bytes: u64| bytes.div_ceil(512_000);
        let numbers = [
            units(load(&c.read_bytes)),
            units(load(&c.written_bytes)),
            load(&c.reads),
            load(&c.writes),
        ];
        for (at, number) in (32..).step_by(16).zip(numbers) {
            put(&mut data, at, &number.to_le_bytes());
        }
        put(&mut data, 160, &load(&c.media_errors).to_le_bytes());
        put(&mut data, 176, &load(&c.logged_errors).to_le_bytes());
        data
    }

    /// Figure 202: supported; of those, what changes blocks.
    fn effects() -> Vec<u8> {
        let mut data = vec![0; 4096];
        for opcode in [
            0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x7c,
        ] {
            put(&mut data, opcode * 4, &[1]);
        }
        for (opcode, effect) in [
            (0x00, 1),
            (0x01, 3),
            (0x02, 1),
            (0x05, 1),
            (0x08, 3),
            (0x09, 3),
        ] {
            put(&mut data, 1024 + opcode * 4, &[effect]);
        }
        data
    }
}
