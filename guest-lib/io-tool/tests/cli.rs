//! The program as its users run it.
#![allow(clippy::unwrap_used)]

use farlane_io_core::plan::store::Store;
use farlane_io_core::plan::trace::{Decision, Piece, Way, Why};
use std::path::Path;
use std::process::{Command, Output};

fn farlane_io(config: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farlane-io"))
        .args(arguments)
        .env("FARLANE_IO_CONFIG", config)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_file_that_is_too_short_is_refused_with_the_reason_and_nothing_is_stored() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (config, file) = (folder.path().join("io.toml"), folder.path().join("short"));
    std::fs::write(&file, vec![7; 64 << 10]).unwrap();
    let output = farlane_io(&config, &["calibrate", file.to_str().unwrap()]);
    assert!(!output.status.success());
    let errors = text(&output.stderr);
    assert!(
        errors.contains("sizes") || errors.contains("direct I/O"),
        "{errors}"
    );
    assert!(!config.exists());
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("io.toml");
    for target in ["/dev/null", "/nowhere/at/all"] {
        let output = farlane_io(&config, &["calibrate", target]);
        assert!(!output.status.success());
        assert!(
            text(&output.stderr).contains(target),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn a_calibration_is_stored_or_refused_with_the_reason() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = folder.path().join("io.toml");
    let target = folder.path().to_str().unwrap();
    let output = farlane_io(&config, &["calibrate", target]);
    let (said, errors) = (text(&output.stdout), text(&output.stderr));
    let stored = std::fs::read_to_string(&config);
    if output.status.success() {
        assert!(said.contains("S_cutoff") && said.contains("R^2"), "{said}");
        assert!(stored.unwrap().contains("provider = \"soft\""));
        assert_ne!(Store::read(&config).unwrap(), Store::default());
    } else {
        // A file system without direct I/O, or a machine too busy to measure on.
        let reason = ["direct I/O", "make no model"];
        assert!(
            reason.iter().any(|reason| errors.contains(reason)),
            "{errors}"
        );
        assert!(stored.is_err());
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert!(left.len() <= 1, "nothing is left but the store: {left:?}");
}

#[test]
fn a_trace_is_drawn_and_summed_up() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let mut lines = String::new();
    for index in 0..100_u32 {
        let file = index % 3;
        let decision = Decision {
            time_us: 1_000_000 + u64::from(index) * 1000,
            took_us: 500,
            thread: 1,
            call: "pread".into(),
            file: format!("/data/{file}"),
            device: "254:0".into(),
            inode: u64::from(file),
            offset: Some(0),
            length: 12_288,
            result: 12_288,
            cached: Some(4096),
            pieces: vec![
                Piece {
                    way: Way::Cache,
                    bytes: 4096,
                },
                Piece {
                    way: Way::P2p,
                    bytes: 8192,
                },
            ],
            why: Why::Schedule,
        };
        lines += &decision.line().unwrap();
    }
    std::fs::write(&trace, lines).unwrap();
    let out = folder.path().join("drawn");
    let arguments = [
        "report",
        trace.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ];
    let output = farlane_io(Path::new("/nonexistent"), &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let all = said.lines().find(|line| line.starts_with("all")).unwrap();
    for number in ["100", "409600", "819200", "500.0"] {
        assert!(
            all.split_whitespace().any(|word| word == number),
            "{number}: {all}"
        );
    }
    let drawing = std::fs::read_to_string(out.join("io-trace.svg")).unwrap();
    for part in ["all files", "/data/0", "/data/2", "P2P"] {
        assert!(drawing.contains(part), "{part}");
    }
}

#[test]
fn what_is_no_trace_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    std::fs::write(&trace, "pread(3, 4096)\n").unwrap();
    let output = farlane_io(
        Path::new("/nonexistent"),
        &["report", trace.to_str().unwrap()],
    );
    assert!(!output.status.success());
    assert!(
        text(&output.stderr).contains("Line 1"),
        "{}",
        text(&output.stderr)
    );
}
