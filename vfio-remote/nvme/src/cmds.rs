//! Commands: bytes of a submission queue entry to typed commands. What needs no knowledge of the
//! controller's state is checked here.

use crate::bits::{Sqe, Status, admin, byte, high, low, nvm, quad};
use crate::data::DataPointer;
use crate::ids::{CqId, NamespaceId, SqId};

/// Create I/O Submission Queue (NVMe 1.4, 5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateSq {
    /// Queue Identifier.
    pub id: SqId,
    /// Queue Size, in entries.
    pub entries: u32,
    /// Completion Queue Identifier.
    pub cq: CqId,
    /// Address of its first entry.
    pub address: u64,
}

/// Create I/O Completion Queue (NVMe 1.4, 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateCq {
    /// Queue Identifier.
    pub id: CqId,
    /// Queue Size, in entries.
    pub entries: u32,
    /// Interrupt Vector, if it interrupts.
    pub vector: Option<u16>,
    /// Interrupt Vector, whether or not it is enabled.
    pub named_vector: u16,
    /// Address of its first entry.
    pub address: u64,
}

/// Which value of a feature (5.14.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// The value in force.
    Current,
    /// The value after a reset; also the saved one.
    Default,
    /// Whether it can be changed and saved.
    Capabilities,
}

impl Select {
    /// From dword 10.
    fn parse(dword: u32) -> Result<Self, Status> {
        match dword >> 8 & 7 {
            0 => Ok(Self::Current),
            1 | 2 => Ok(Self::Default),
            3 => Ok(Self::Capabilities),
            _ => Err(Status::INVALID_FIELD),
        }
    }
}

/// An admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminCommand {
    /// Delete I/O Submission Queue.
    DeleteSq(SqId),
    /// Create I/O Submission Queue.
    CreateSq(CreateSq),
    /// Delete I/O Completion Queue.
    DeleteCq(CqId),
    /// Create I/O Completion Queue.
    CreateCq(CreateCq),
    /// Get Log Page.
    LogPage {
        /// Namespace ID.
        nsid: NamespaceId,
        /// Log Page Identifier.
        page: u8,
        /// Retain Asynchronous Event.
        retain_event: bool,
        /// Length in bytes.
        length: u64,
        /// Log Page Offset, in bytes.
        offset: u64,
        /// Where the log page goes.
        data: DataPointer,
    },
    /// Identify.
    Identify {
        /// Controller or Namespace Structure: which data to return.
        cns: u8,
        /// Namespace ID.
        nsid: NamespaceId,
        /// Where the data structure goes.
        data: DataPointer,
    },
    /// Abort.
    Abort {
        /// Submission Queue Identifier of the command.
        sq: SqId,
        /// Command Identifier.
        cid: u16,
    },
    /// Set Features.
    SetFeatures {
        /// Namespace ID.
        nsid: NamespaceId,
        /// Feature Identifier.
        feature: u8,
        /// Save: keep it over resets.
        save: bool,
        /// Dword 11: the attribute's value.
        value: u32,
        /// Attribute data, where the feature has some.
        data: DataPointer,
    },
    /// Get Features.
    GetFeatures {
        /// Namespace ID.
        nsid: NamespaceId,
        /// Feature Identifier.
        feature: u8,
        /// Which of its values.
        select: Select,
        /// Dword 11: the vector or sensor.
        index: u32,
        /// Where attribute data goes.
        data: DataPointer,
    },
    /// Asynchronous Event Request.
    AsyncEvent,
    /// Doorbell Buffer Config.
    DoorbellBuffer {
        /// Address of the shadow doorbells.
        doorbells: u64,
        /// Address of the event indices.
        events: u64,
    },
}

/// The fields of Read, Write and Compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Namespace ID.
    pub nsid: NamespaceId,
    /// Starting LBA.
    pub lba: u64,
    /// Blocks, not zero.
    pub blocks: u64,
    /// Force Unit Access: complete only when it is durable.
    pub force_unit_access: bool,
    /// Data Pointer.
    pub data: DataPointer,
}

/// An I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoCommand {
    /// Flush, of one or all namespaces.
    Flush {
        /// Namespace ID.
        nsid: NamespaceId,
    },
    /// Read.
    Read(Transfer),
    /// Write.
    Write(Transfer),
    /// Compare.
    Compare(Transfer),
    /// Write Zeroes.
    WriteZeroes {
        /// Namespace ID.
        nsid: NamespaceId,
        /// Starting LBA.
        lba: u64,
        /// Blocks, not zero.
        blocks: u64,
        /// Force Unit Access: complete only when it is durable.
        force_unit_access: bool,
        /// Deallocate: the blocks are to be given back.
        deallocate: bool,
    },
    /// Dataset Management.
    DatasetManagement {
        /// Namespace ID.
        nsid: NamespaceId,
        /// Ranges, 1 to 256.
        ranges: u64,
        /// Deallocate: they are to be given back. Other attributes are hints that are ignored.
        deallocate: bool,
        /// Data Pointer of the ranges.
        data: DataPointer,
    },
}

/// PRPs only: what admin commands use over PCIe (4.4, SGL support).
fn prps(sqe: &Sqe) -> Result<DataPointer, Status> {
    match sqe.flags >> 6 {
        0 => Ok(DataPointer::Prp(sqe.dptr[0], sqe.dptr[1])),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn data(sqe: &Sqe) -> Result<DataPointer, Status> {
    match sqe.flags >> 6 {
        0 => Ok(DataPointer::Prp(sqe.dptr[0], sqe.dptr[1])),
        1 | 2 => {
            let mut descriptor = [0; 16];
            descriptor[..8].copy_from_slice(&sqe.dptr[0].to_le_bytes());
            descriptor[8..].copy_from_slice(&sqe.dptr[1].to_le_bytes());
            Ok(DataPointer::Sgl(descriptor))
        }
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Fused operations are not offered.
fn check_fused(sqe: &Sqe) -> Result<(), Status> {
    if sqe.flags & 0b11 == 0 {
        Ok(())
    } else {
        Err(Status::INVALID_FIELD)
    }
}

impl AdminCommand {
    /// Parses an entry of the admin queue.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn parse(sqe: &Sqe) -> Result<Self, Status> {
        check_fused(sqe)?;
        let nsid = NamespaceId::new(sqe.nsid);
        let entries = u32::from(high(sqe.cdw10)) + 1;
        let contiguous = sqe.cdw11 & 1 != 0;
        Ok(match sqe.opcode {
            admin::DELETE_SQ => Self::DeleteSq(SqId::new(low(sqe.cdw10))),
            admin::DELETE_CQ => Self::DeleteCq(CqId::new(low(sqe.cdw10))),
            admin::CREATE_SQ | admin::CREATE_CQ if !contiguous => {
                return Err(Status::INVALID_FIELD);
            }
            admin::CREATE_SQ => Self::CreateSq(CreateSq {
                id: SqId::new(low(sqe.cdw10)),
                entries,
                cq: CqId::new(high(sqe.cdw11)),
                address: sqe.dptr[0],
            }),
            admin::CREATE_CQ => Self::CreateCq(CreateCq {
                id: CqId::new(low(sqe.cdw10)),
                entries,
                vector: (sqe.cdw11 & 2 != 0).then(|| high(sqe.cdw11)),
                named_vector: high(sqe.cdw11),
                address: sqe.dptr[0],
            }),
            admin::GET_LOG_PAGE => Self::LogPage {
                nsid,
                page: byte(sqe.cdw10),
                retain_event: sqe.cdw10 & 1 << 15 != 0,
                length: (u64::from(high(sqe.cdw10)) | u64::from(low(sqe.cdw11)) << 16) * 4 + 4,
                offset: quad(sqe.cdw12, sqe.cdw13),
                data: prps(sqe)?,
            },
            admin::IDENTIFY => Self::Identify {
                cns: byte(sqe.cdw10),
                nsid,
                data: prps(sqe)?,
            },
            admin::ABORT => Self::Abort {
                sq: SqId::new(low(sqe.cdw10)),
                cid: high(sqe.cdw10),
            },
            admin::SET_FEATURES => Self::SetFeatures {
                nsid,
                feature: byte(sqe.cdw10),
                save: sqe.cdw10 >> 31 != 0,
                value: sqe.cdw11,
                data: prps(sqe)?,
            },
            admin::GET_FEATURES => Self::GetFeatures {
                nsid,
                feature: byte(sqe.cdw10),
                select: Select::parse(sqe.cdw10)?,
                index: sqe.cdw11,
                data: prps(sqe)?,
            },
            admin::ASYNC_EVENT => Self::AsyncEvent,
            admin::DOORBELL_BUFFER => Self::DoorbellBuffer {
                doorbells: sqe.dptr[0],
                events: sqe.dptr[1],
            },
            _ => return Err(Status::INVALID_OPCODE),
        })
    }
}

impl IoCommand {
    /// Parses an entry of an I/O queue.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn parse(sqe: &Sqe) -> Result<Self, Status> {
        check_fused(sqe)?;
        let nsid = NamespaceId::new(sqe.nsid);
        let lba = quad(sqe.cdw10, sqe.cdw11);
        let blocks = u64::from(low(sqe.cdw12)) + 1;
        let force_unit_access = sqe.cdw12 & 1 << 30 != 0;
        let transfer = || {
            Ok(Transfer {
                nsid,
                lba,
                blocks,
                force_unit_access,
                data: data(sqe)?,
            })
        };
        Ok(match sqe.opcode {
            nvm::FLUSH => Self::Flush { nsid },
            nvm::READ => Self::Read(transfer()?),
            nvm::WRITE => Self::Write(transfer()?),
            nvm::COMPARE => Self::Compare(transfer()?),
            nvm::WRITE_ZEROES => Self::WriteZeroes {
                nsid,
                lba,
                blocks,
                force_unit_access,
                deallocate: sqe.cdw12 & 1 << 25 != 0,
            },
            nvm::DATASET_MANAGEMENT => Self::DatasetManagement {
                nsid,
                ranges: u64::from(byte(sqe.cdw10)) + 1,
                deallocate: sqe.cdw11 & 1 << 2 != 0,
                data: data(sqe)?,
            },
            _ => return Err(Status::INVALID_OPCODE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::FromBytes as _;

    #[test]
    fn a_read_says_which_blocks_and_where_to() {
        let sqe = Sqe {
            opcode: nvm::READ,
            nsid: 1,
            dptr: [0x1000, 0x2000],
            cdw10: 7,
            cdw11: 1,
            cdw12: 1 << 30 | 3,
            ..Sqe::default()
        };
        let Ok(IoCommand::Read(transfer)) = IoCommand::parse(&sqe) else {
            panic!("not a read");
        };
        assert_eq!((transfer.lba, transfer.blocks), (0x1_0000_0007, 4));
        assert!(transfer.force_unit_access);
        assert_eq!(transfer.data, DataPointer::Prp(0x1000, 0x2000));
    }

    #[test]
    fn what_is_not_offered_is_an_invalid_opcode() {
        // Write Uncorrectable, Verify, Reservation Register; Firmware Commit, Format NVM,
        // Namespace Management, Keep Alive.
        for opcode in [0x04, 0x0c, 0x0d] {
            let sqe = Sqe {
                opcode,
                ..Sqe::default()
            };
            assert_eq!(IoCommand::parse(&sqe), Err(Status::INVALID_OPCODE));
        }
        for opcode in [0x10, 0x80, 0x0d, 0x18] {
            let sqe = Sqe {
                opcode,
                ..Sqe::default()
            };
            assert_eq!(AdminCommand::parse(&sqe), Err(Status::INVALID_OPCODE));
        }
    }

    #[test]
    fn admin_commands_take_no_scatter_gather_lists_and_nothing_is_fused() {
        let sqe = Sqe {
            opcode: admin::IDENTIFY,
            flags: 0x40,
            ..Sqe::default()
        };
        assert_eq!(AdminCommand::parse(&sqe), Err(Status::INVALID_FIELD));
        let sqe = Sqe {
            opcode: nvm::COMPARE,
            flags: 1,
            ..Sqe::default()
        };
        assert_eq!(IoCommand::parse(&sqe), Err(Status::INVALID_FIELD));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed(bytes in prop::array::uniform32(any::<[u8; 2]>())) {
            let sqe = Sqe::read_from_bytes(bytes.as_flattened()).unwrap();
            if let Ok(IoCommand::DatasetManagement { ranges, .. }) = IoCommand::parse(&sqe) {
                prop_assert!((1..=256).contains(&ranges));
            }
            if let Ok(AdminCommand::CreateSq(create)) = AdminCommand::parse(&sqe) {
                prop_assert!((1..=65536).contains(&create.entries));
            }
            if let Ok(AdminCommand::LogPage { length, .. }) = AdminCommand::parse(&sqe) {
                prop_assert!(length % 4 == 0 && length <= 4 << 32);
            }
        }
    }
}
