//! The store and the trace.
#![allow(clippy::unwrap_used)]

use farlane_io_core::plan::oracle::p3700;
use farlane_io_core::plan::store::{Calibration, Store, StoreError};
use farlane_io_core::plan::trace::{Decision, Piece, TraceError, Way, Why, read};
use proptest::prelude::*;

fn calibration(device: &str, provider: &str, r2: f64) -> Calibration {
    Calibration {
        device: device.into(),
        provider: provider.into(),
        measured: 1_700_000_000,
        r2_p2p: r2,
        r2_cache: 0.999,
        model: p3700(),
    }
}

#[test]
fn a_store_gives_back_what_was_put_last() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/io.toml");
    assert_eq!(Store::read(&path).unwrap(), Store::default());
    let mut store = Store::default();
    store.put(calibration("serial A", "soft", 0.98));
    store.put(calibration("serial A", "p2pmem", 0.99));
    store.put(calibration("serial A", "soft", 0.995));
    store.write(&path).unwrap();
    let read = Store::read(&path).unwrap();
    assert_eq!(read, store);
    assert_eq!(read.find("serial A", "soft").unwrap().r2_p2p, 0.995);
    assert_eq!(read.find("serial A", "p2pmem").unwrap().r2_p2p, 0.99);
    assert!(read.find("serial B", "soft").is_none());
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "nothing is left beside the file");
}

#[test]
fn a_store_with_numbers_that_are_no_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("io.toml");
    let mut store = Store::default();
    store.put(calibration("serial A", "soft", 0.99));
    store.write(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let broken = [
        text.replace("cutoff_bytes = ", "cutoff_bytes = 99999"),
        text.replace("p2p_bandwidth = ", "p2p_bandwidth = -"),
        text.replace("provider", "colour"),
        "calibration = 3".into(),
        "\0".into(),
    ];
    for text in broken {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Store::read(&path), Err(StoreError::Parse { .. })));
    }
}

fn decision(file: &str) -> Decision {
    let piece = |way| Piece { way, bytes: 4096 };
    Decision {
        time_us: 1_700_000_000_000_000,
        took_us: 57,
        thread: 11,
        call: "pread".into(),
        file: file.into(),
        device: "254:0".into(),
        inode: 99,
        offset: Some(4096),
        length: 8192,
        result: 8192,
        cached: Some(4096),
        pieces: vec![piece(Way::Cache), piece(Way::P2p)],
        why: Why::Schedule,
    }
}

#[test]
fn a_trace_that_was_cut_off_is_read_up_to_there() {
    let line = decision("/log").line().unwrap();
    let text = format!("{line}{line}{}", &line[..20]);
    let decisions: Vec<_> = read(text.as_bytes()).collect::<Result<_, _>>().unwrap();
    assert_eq!(decisions, [decision("/log"), decision("/log")]);
}

#[test]
fn what_is_no_trace_is_refused_with_its_line() {
    let line = decision("").line().unwrap();
    let text = format!("{line}{{}}\n");
    let error = read(text.as_bytes()).nth(1).unwrap().unwrap_err();
    assert!(
        matches!(error, TraceError::Parse { line: 2, .. }),
        "{error}"
    );
    let long = vec![b' '; 4 << 20];
    let error = read(long.as_slice()).next().unwrap().unwrap_err();
    assert!(matches!(error, TraceError::Long { line: 1 }), "{error}");
}

proptest! {
    #[test]
    fn any_path_survives_a_trace(path in ".*") {
        let written = decision(&path);
        let line = written.line().unwrap();
        prop_assert_eq!(line.matches('\n').count(), 1);
        let found = read(line.as_bytes()).next().unwrap().unwrap();
        prop_assert_eq!(found, written);
    }

    #[test]
    fn any_bytes_are_a_trace_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for line in read(bytes.as_slice()) {
            let _ = line.is_ok();
        }
    }
}
