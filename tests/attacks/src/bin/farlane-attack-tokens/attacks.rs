//! What a process can try, and what must become of it.

use crate::disk::{Disk, byte_at};
use crate::memory::Memory;
use crate::process::{PAGE, PHONY_BYTES, Page, Process};
use anyhow::{Context as _, Result, bail, ensure};
use farlane_abi::tunnel::{DIRECTION_OUT_OF_DEVICE, Envelope, TOKEN_EPOCHS};
use farlane_abi::zerocopy::IntoBytes as _;
use std::io;
use std::sync::Barrier;
use std::time::Duration;

/// Bytes of device memory that are used.
pub const BAR_BYTES: usize = 4 << 20;
/// Bytes of the disk that are used.
pub const DISK_BYTES: usize = 1 << 20;
/// What stands in device memory where nothing must land.
const UNTOUCHED: u8 = 0xee;
/// Where an honest read has the disk's first page in device memory: misaligned on purpose.
const HONEST: u64 = 12345;
/// Pause between two writes of a process that goes on writing.
const PAUSE: Duration = Duration::from_millis(5);

/// Where an attack on memory that is taken away is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The requests are prepared.
    Ready,
    /// They are being made.
    Reading,
    /// The memory is not mapped any more.
    Unmapped,
}

/// A process with all that it needs for mischief.
pub struct Attacker {
    pub process: Process,
    pub bar: Memory,
    pub disk: Disk,
    pub region: u32,
    sequence: u64,
}

impl Attacker {
    /// Prepares; the beginning of the disk at `disk` is overwritten.
    pub fn new(disk: &str, resource: &str) -> Result<Self> {
        let process = Process::open()?;
        let bar = Memory::open(resource, BAR_BYTES)?;
        let region = process.register(&bar, BAR_BYTES)?;
        Ok(Self {
            process,
            bar,
            disk: Disk::open(disk)?,
            region,
            sequence: 0,
        })
    }

    /// A page that was never used.
    pub fn page(&mut self, offset: u64) -> Page {
        self.sequence += 1;
        Page::new(1, self.sequence, self.region, offset)
    }

    fn read_page(&self, phony: usize) -> Result<io::Result<usize>> {
        self.disk.read(0, &self.process.phony, phony * PAGE, PAGE)
    }

    /// An honest read lands, byte for byte, and has its receipt.
    pub fn honest(&mut self) -> Result<()> {
        let page = self.page(HONEST);
        let offset = usize::try_from(HONEST)?;
        self.bar.write(offset - 1, &[UNTOUCHED; PAGE + 2])?;
        self.process.prepare(0, page)?;
        self.read_page(0)?.context("An honest read")?;
        ensure!(self.process.landed(page)? == 0xff, "No receipt");
        let mut bytes = [0; PAGE + 2];
        self.bar.read(offset - 1, &mut bytes)?;
        let landed = bytes[1..=PAGE]
            .iter()
            .enumerate()
            .all(|(at, &byte)| byte == byte_at(at));
        ensure!(landed, "Other bytes than the disk's");
        ensure!(
            bytes[0] == UNTOUCHED && bytes[PAGE + 1] == UNTOUCHED,
            "Bytes beside the target"
        );
        Ok(())
    }

    /// Whatever stands in phony page 0 now, reading into it and writing from it are errors, and
    /// nothing changes.
    pub fn refused(&self, what: &str) -> Result<()> {
        self.bar.write(0, &[UNTOUCHED; 2 * PAGE])?;
        for (way, result) in [
            ("read", self.read_page(0)?),
            ("write", self.disk.write(0, &self.process.phony, 0, PAGE)?),
        ] {
            match result {
                Err(error) if error.raw_os_error() == Some(libc::EIO) => {}
                Err(error) => bail!("{what}: the {way} fails with {error}"),
                Ok(bytes) => bail!("{what}: the {way} moves {bytes} bytes"),
            }
        }
        let mut bytes = [0; 2 * PAGE];
        self.bar.read(0, &mut bytes)?;
        ensure!(
            bytes == [UNTOUCHED; 2 * PAGE],
            "{what}: device memory has changed"
        );
        self.disk_is_whole().with_context(|| what.to_owned())
    }

    /// The disk still has what was written.
    pub fn disk_is_whole(&self) -> Result<()> {
        let plain = Memory::private(PAGE)?;
        self.disk.read(0, &plain, 0, PAGE)??;
        let mut bytes = [0; PAGE];
        plain.read(0, &mut bytes)?;
        let same = bytes
            .iter()
            .enumerate()
            .all(|(at, &byte)| byte == byte_at(at));
        ensure!(same, "The disk has changed");
        Ok(())
    }

    /// Envelopes that are wrong in one thing.
    pub fn forgeries(&mut self) -> Result<()> {
        let empty = Envelope::default();
        self.process.fill(0, empty)?;
        self.refused("no envelope")?;

        let page = self.page(0);
        self.process.arm(page)?;
        let good = self.process.envelope(page)?;
        let forged = Envelope {
            key: [good.key[0], (good.key[1].get() ^ 1).into()],
            ..good
        };
        self.process.fill(0, forged)?;
        self.refused("a forged key")?;
        for slot in [2, 255, 256, u32::MAX] {
            self.process.fill(
                0,
                Envelope {
                    slot: slot.into(),
                    ..good
                },
            )?;
            self.refused("another slot")?;
        }
        for sequence in [0, page.sequence + 1, u64::MAX] {
            let wrong = Envelope {
                sequence: sequence.into(),
                ..good
            };
            self.process.fill(0, wrong)?;
            self.refused("another number")?;
        }
        let envelope = self.process.envelope(page)?;
        // The first sector's in each sector, moved by one.
        for at in (0..PAGE).step_by(512) {
            let moved = Envelope {
                sector: 1.into(),
                ..envelope
            };
            self.process.phony.write(at, moved.as_bytes())?;
        }
        self.refused("the envelope of another sector")
    }

    /// Slots that are wrong in one thing.
    pub fn slots(&mut self) -> Result<()> {
        let end = BAR_BYTES as u64;
        for offset in [end, end - 4095, u64::MAX - 100] {
            let page = self.page(offset);
            self.process.prepare(0, page)?;
            self.refused("beyond the region")?;
        }
        for region in [self.region + 1, u32::MAX] {
            let page = Page {
                region,
                ..self.page(0)
            };
            self.process.prepare(0, page)?;
            self.refused("another region")?;
        }
        for length in [0, 511, 512, 4097, u32::MAX] {
            let page = Page {
                length,
                ..self.page(0)
            };
            self.process.prepare(0, page)?;
            self.refused("another length")?;
        }
        for age in [TOKEN_EPOCHS, 1 << 31, u32::MAX - 1] {
            let page = Page {
                age,
                ..self.page(0)
            };
            self.process.prepare(0, page)?;
            self.refused("an expired token")?;
        }
        // Good for writing the disk: reading it uses it up, and then it is good for nothing.
        let page = Page {
            direction: DIRECTION_OUT_OF_DEVICE,
            ..self.page(0)
        };
        self.process.prepare(0, page)?;
        self.refused("the other direction")
    }

    /// A token that was used, and one that was revoked.
    pub fn replays(&mut self) -> Result<()> {
        let page = self.page(0);
        self.process.prepare(0, page)?;
        let spent = self.process.envelope(page)?;
        self.read_page(0)?.context("An honest read")?;
        self.process.fill(0, spent)?;
        self.refused("a replayed token")?;
        self.process.arm(page)?;
        self.refused("a replayed token, armed again")?;

        let page = self.page(0);
        self.process.prepare(0, page)?;
        self.process.arm(Page {
            sequence: 0,
            ..page
        })?;
        self.refused("a disarmed token")
    }

    /// A token of another process in this one's phony page.
    pub fn stranger(&mut self, resource: &str) -> Result<()> {
        let other = Process::open()?;
        let bar = Memory::open(resource, BAR_BYTES)?;
        let region = other.register(&bar, BAR_BYTES)?;
        let page = Page {
            region,
            ..self.page(0)
        };
        other.arm(page)?;
        self.process.fill(0, other.envelope(page)?)?;
        self.refused("another process's token")?;
        // The same slot and number are armed here, too.
        self.process.arm(page)?;
        self.refused("another process's token for an armed slot")
    }

    /// Device memory that was taken away.
    pub fn unregistered(&mut self) -> Result<()> {
        let page = self.page(0);
        self.process.prepare(0, page)?;
        self.process.unregister(self.region)?;
        self.refused("a region that is gone")?;
        self.region = self.process.register(&self.bar, BAR_BYTES)?;
        self.honest()
    }

    /// Memory that is no device's cannot be registered.
    pub fn not_device_memory(&self) -> Result<()> {
        let own = Memory::private(PAGE)?;
        own.write(0, &[1])?;
        for (address, length) in [
            (own.address(), PAGE),
            (0, PAGE),
            (self.bar.address() + 1, PAGE),
            (self.bar.address(), PAGE + 1),
            (self.bar.address() + BAR_BYTES as u64, PAGE),
            (u64::MAX - 4095, PAGE),
        ] {
            let result = self.process.register_anything(address, length);
            ensure!(
                result.is_err(),
                "{length} bytes at {address:#x} were registered"
            );
        }
        Ok(())
    }

    /// Requests while their target is unmapped; `at` is called at each step. Each request succeeds
    /// or fails, and none lands after the unmapping. Returns how many pages landed before.
    pub fn unmapped_in_flight(
        &mut self,
        resource: &str,
        at: impl Fn(Step) -> Result<()>,
    ) -> Result<usize> {
        let second = Memory::open(resource, BAR_BYTES)?;
        let region = self.process.register(&second, BAR_BYTES)?;
        let pages = PHONY_BYTES / PAGE;
        let mut targets = Vec::new();
        for number in 0..pages {
            let offset = (number * PAGE) as u64;
            let slot = u32::try_from(number)? + 2;
            let page = Page {
                slot,
                region,
                ..self.page(offset)
            };
            self.process.prepare(number, page)?;
            targets.push(page);
        }
        self.bar.write(0, &vec![UNTOUCHED; PHONY_BYTES])?;
        at(Step::Ready)?;
        let barrier = Barrier::new(2);
        let (process, disk) = (&self.process, &self.disk);
        let result = std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                barrier.wait();
                disk.read(0, &process.phony, 0, PHONY_BYTES)
            });
            barrier.wait();
            let waited = at(Step::Reading);
            drop(second);
            let told = at(Step::Unmapped);
            // The mapping is gone: from here on nothing may land that has not.
            let mut before = vec![0; PHONY_BYTES];
            let looked = self.bar.read(0, &mut before);
            let read = reading.join();
            waited.and(told).and(looked).map(|()| (before, read))
        });
        let (before, read) = result?;
        let Ok(read) = read else {
            bail!("The reading thread has panicked");
        };
        match read? {
            Ok(_) => {}
            Err(error) => ensure!(error.raw_os_error() == Some(libc::EIO), "{error}"),
        }
        let mut after = vec![0; PHONY_BYTES];
        self.bar.read(0, &mut after)?;
        ensure!(
            before == after,
            "Bytes landed after their target was unmapped"
        );
        let mut whole = 0;
        for (at, target) in targets.iter().enumerate() {
            let page = &after[at * PAGE..][..PAGE];
            let good = page
                .iter()
                .enumerate()
                .all(|(i, &byte)| byte == byte_at(at * PAGE + i));
            let landed = self.process.landed(*target)? == 0xff;
            ensure!(!landed || good, "A receipt for bytes that did not land");
            whole += usize::from(landed);
        }
        self.process.unregister(region)?;
        self.honest()?;
        Ok(whole)
    }

    /// Writes what the disk has, from device memory, until the device is gone, as an honest process
    /// does: it is told nothing before. Each write arrives, with its receipt, or is an error.
    /// `first` is called after the first one. Returns how many have arrived, and how many have not.
    pub fn written_to_the_end(&mut self, first: impl Fn()) -> Result<[usize; 2]> {
        let [mut arrived, mut refused] = [0; 2];
        while !self.process.is_dead()? {
            let page = Page {
                direction: DIRECTION_OUT_OF_DEVICE,
                ..self.page(HONEST)
            };
            self.process.prepare(0, page)?;
            match self.disk.write(0, &self.process.phony, 0, PAGE)? {
                Ok(bytes) => {
                    let landed = self.process.landed(page)?;
                    ensure!(
                        bytes == PAGE && landed == 0xff,
                        "A write of {bytes} bytes has receipts {landed:#x}"
                    );
                    arrived += 1;
                    if arrived == 1 {
                        first();
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::EIO) => refused += 1,
                Err(error) => return Err(error).context("A write"),
            }
            self.disk_is_whole()?;
            std::thread::sleep(PAUSE);
        }
        Ok([arrived, refused])
    }

    /// Noise in phony pages and slots.
    pub fn noise(&mut self, rounds: u32) -> Result<()> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..rounds {
            let page = self.page(random() % (2 * BAR_BYTES as u64));
            self.process.prepare(0, page)?;
            for _ in 0..random() % 4 {
                let at = usize::try_from(random() % 64)? * 8;
                self.process.phony.write(at, &random().to_le_bytes())?;
            }
            let pages = usize::try_from(1 + random() % 4)?;
            // Whether it fails or not: what was forged fails, what was left whole may not.
            let _ = self.disk.read(0, &self.process.phony, 0, pages * PAGE)?;
        }
        self.disk_is_whole()?;
        self.honest()
    }
}
