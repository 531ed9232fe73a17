//! The Error Information log (NVMe 1.4, 5.14.1.1): what is known of the latest commands that have
//! failed, and of doorbells that were wrong.

use crate::bits::Status;
use crate::controller::CommandId;
use crate::identify::put;
use std::collections::VecDeque;

/// Entries (ELPE, zero-based, says as many).
pub const ENTRIES: usize = 64;
/// Bytes of an entry.
const ENTRY_BYTES: usize = 64;
/// Instead of the identifiers of a command, or of a place in it: there is none.
const NONE: u16 = u16::MAX;

/// An error, as an entry tells of it (figure 193).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The command, where the error is one's.
    pub command: Option<CommandId>,
    /// Status of its completion, or what says most of the error.
    pub status: Status,
}

/// The log since the last reset: "should be cleared on Controller Level Reset".
#[derive(Debug, Default)]
pub struct ErrorLog {
    /// The newest first.
    entries: VecDeque<[u8; ENTRY_BYTES]>,
}

impl ErrorLog {
    /// Adds the `number`th error there was, counted from 1; the oldest that there is no room for is
    /// forgotten.
    pub fn add(&mut self, number: u64, failure: &Failure) {
        let mut entry = [0; ENTRY_BYTES];
        let (queue, cid, nsid, lba) = match &failure.command {
            Some(command) => (
                command.queue.get(),
                command.cid,
                command.nsid.get(),
                command.lba,
            ),
            None => (NONE, NONE, 0, 0),
        };
        put(&mut entry, 0, &number.to_le_bytes());
        put(&mut entry, 8, &queue.to_le_bytes());
        put(&mut entry, 10, &cid.to_le_bytes());
        put(&mut entry, 12, &(failure.status.0 << 1).to_le_bytes());
        // Parameter Error Location.
        put(&mut entry, 14, &NONE.to_le_bytes());
        put(&mut entry, 16, &lba.to_le_bytes());
        put(&mut entry, 24, &nsid.to_le_bytes());
        self.entries.truncate(ENTRIES - 1);
        self.entries.push_front(entry);
    }

    /// The whole log page; entries without an error are zero.
    pub fn page(&self) -> Vec<u8> {
        let mut page: Vec<u8> = self.entries.iter().flatten().copied().collect();
        page.resize(ENTRIES * ENTRY_BYTES, 0);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{NamespaceId, SqId};

    #[test]
    fn the_newest_errors_are_kept_and_come_first() {
        let mut log = ErrorLog::default();
        assert!(log.page() == vec![0; 4096]);
        for number in 1..=100 {
            let failure = Failure {
                command: Some(CommandId {
                    queue: SqId::new(3),
                    cid: 7,
                    nsid: NamespaceId::new(5),
                    lba: number * 2,
                }),
                status: Status::UNRECOVERED_READ_ERROR,
            };
            log.add(number, &failure);
        }
        let page = log.page();
        assert_eq!(page.len(), 4096);
        for (entry, number) in page.chunks(64).zip((37..=100_u64).rev()) {
            let mut expected = [0; 64];
            expected[..8].copy_from_slice(&number.to_le_bytes());
            expected[8..16].copy_from_slice(&[3, 0, 7, 0, 2, 5, 0xff, 0xff]);
            expected[16..24].copy_from_slice(&(number * 2).to_le_bytes());
            expected[24] = 5;
            assert!(entry == expected, "{number}");
        }
    }

    #[test]
    fn an_error_that_is_no_commands_names_no_queue() {
        let mut log = ErrorLog::default();
        let failure = Failure {
            command: None,
            status: Status::INVALID_FIELD,
        };
        log.add(1, &failure);
        let mut expected = [0; ENTRY_BYTES];
        expected[0] = 1;
        expected[8..16].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 4, 0x80, 0xff, 0xff]);
        assert!(log.page()[..ENTRY_BYTES] == expected);
    }
}
