//! Everything that the device does, compared with what the processor does.

use crate::{Report, contents};
use anyhow::{Result, ensure};
use farlane_gpu_driver::{DmaBuffer, Gpu, Match, Tile};

/// Bytes of the buffers that are worked on: more than the device does in one go.
const BYTES: usize = (1 << 20) + 4099;

struct Test<'g> {
    gpu: &'g Gpu,
    report: Report,
}

/// Tries everything, and copies of system memory if asked.
pub fn run(gpu: &Gpu, dma: bool, device: Option<&str>) -> Result<Report> {
    let mut test = Test {
        gpu,
        report: Report {
            what: "self-test",
            ..Report::default()
        },
    };
    test.checksum()?;
    test.copy()?;
    test.search()?;
    test.gather()?;
    test.refusals()?;
    if dma {
        test.dma(device)?;
    }
    Ok(test.report)
}

impl Test<'_> {
    fn same(&mut self, what: &str, is: &[u8], should: &[u8]) -> Result<()> {
        self.report.checks += 1;
        self.report.bytes += u64::try_from(should.len())?;
        let difference = contents::difference(is, should);
        ensure!(
            difference.is_none(),
            "{what}: byte {:#x} is wrong",
            difference.unwrap_or(0)
        );
        Ok(())
    }

    fn checksum(&mut self) -> Result<()> {
        let mut buffer = self.gpu.allocate(BYTES)?;
        contents::fill(1, 0, buffer.as_mut_slice());
        for range in [0..0, 0..BYTES, 1..BYTES, 4095..4097, 7..300_000] {
            let sum = crc32c::crc32c(&contents::make(1, u64::try_from(range.start)?, range.len()));
            ensure!(
                buffer.checksum(range.clone())? == sum,
                "The checksum of {range:?} is wrong"
            );
            self.report.checks += 1;
        }
        Ok(())
    }

    fn copy(&mut self) -> Result<()> {
        let mut source = self.gpu.allocate(BYTES)?;
        let mut target = self.gpu.allocate(BYTES)?;
        contents::fill(2, 0, source.as_mut_slice());
        contents::fill(3, 0, target.as_mut_slice());
        let mut should = contents::make(3, 0, BYTES);
        let data = contents::make(2, 0, BYTES);
        for (at, from, bytes) in [(1, 3, 1), (4096, 0, 8192), (5, 7, 600_001), (BYTES, 0, 0)] {
            target.copy_from(at, &source, from..from + bytes)?;
            should[at..at + bytes].copy_from_slice(&data[from..from + bytes]);
            self.same("A copy", target.as_slice(), &should)?;
        }
        for (from, at) in [(0, 100_000), (100_000, 0), (300_000, 299_999)] {
            target.copy_within(from..from + 700_000, at)?;
            should.copy_within(from..from + 700_000, at);
            self.same("A copy onto itself", target.as_slice(), &should)?;
        }
        Ok(())
    }

    fn search(&mut self) -> Result<()> {
        let mut buffer = self.gpu.allocate(BYTES)?;
        buffer.as_mut_slice().fill(b'.');
        let places = [0, 4090, 262_140, 262_143, 524_280, BYTES - 5];
        for at in places {
            buffer.as_mut_slice()[at..at + 5].copy_from_slice(b"abcab");
        }
        let patterns: [&[u8]; 3] = [b"abcab", b"ab", b"absent"];
        let mut search = self.gpu.prepare(&patterns, 100)?;
        let matches = search.run(&buffer, 0..BYTES)?;
        let mut should: Vec<Match> = Vec::new();
        for at in places {
            let offset = u64::try_from(at)?;
            for (at, pattern) in [(offset, 0), (offset, 1), (offset + 3, 1)] {
                should.push(Match {
                    offset: at,
                    pattern,
                });
            }
        }
        // Two of them overlap.
        should.sort_unstable();
        should.dedup();
        let mut found = matches.found.clone();
        found.sort_unstable();
        ensure!(found == should, "Found {found:?}, not {should:?}");
        ensure!(
            matches.total == u64::try_from(should.len())?,
            "{} matches",
            matches.total
        );
        let few = self.gpu.prepare(&patterns, 2)?.run(&buffer, 0..BYTES)?;
        ensure!(
            few.found.len() == 2 && few.total == matches.total,
            "{few:?}"
        );
        self.report.checks += 2;
        Ok(())
    }

    fn gather(&mut self) -> Result<()> {
        let (pitch, width, rows, offset) = (3001, 700, 300, 77);
        let mut raster = self.gpu.allocate(BYTES)?;
        let mut dense = self.gpu.allocate(width * rows + 1)?;
        contents::fill(4, 0, raster.as_mut_slice());
        let tile = Tile {
            offset,
            pitch,
            width,
            rows: u32::try_from(rows)?,
        };
        dense.gather_from(1, &raster, tile)?;
        let mut should = Vec::new();
        for row in 0..rows {
            let at = u64::try_from(offset + row * pitch)?;
            should.extend(contents::make(4, at, width));
        }
        self.same("A tile", &dense.as_slice()[1..], &should)
    }

    fn refusals(&mut self) -> Result<()> {
        let buffer = self.gpu.allocate(4096)?;
        ensure!(buffer.checksum(0..4097).is_err(), "Beyond a buffer");
        ensure!(
            self.gpu.allocate(self.gpu.memory_bytes()).is_err(),
            "More memory than there is"
        );
        self.report.checks += 2;
        Ok(())
    }

    fn dma(&mut self, device: Option<&str>) -> Result<()> {
        const PAGES: &str = "/proc/sys/vm/nr_hugepages";
        std::fs::write(PAGES, "4")?;
        let mut source = DmaBuffer::new(4 << 20, device)?;
        let mut target = DmaBuffer::new(4 << 20, device)?;
        let mut video = self.gpu.allocate(4 << 20)?;
        let length = source.len();
        contents::fill(5, 0, &mut source);
        contents::fill(6, 0, &mut target);
        video.copy_from_dma(0, &source, 0..length)?;
        self.same("A copy in", video.as_slice(), &source)?;
        let mut should = contents::make(6, 0, length);
        let range = 1_000_003..3_500_001;
        video.copy_to_dma(range.clone(), &mut target, 77)?;
        should[77..77 + range.len()].copy_from_slice(&source[range]);
        self.same("A copy out", &target, &should)?;
        drop((source, target));
        std::fs::write(PAGES, "0")?;
        Ok(())
    }
}
