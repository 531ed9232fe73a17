//! The Debian packages: installed, used, upgraded and purged in clean trees of two releases.

mod client;
mod trial;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::debian::{HEADERS_6_1, HEADERS_6_12, TreeSpec};
use farlane_kit::process::tail;
use farlane_kit::progress;
use farlane_kit::report::Report;
use farlane_kit::tree::Tree;

use self::client::{Client, DRIVER};
use crate::room::Room;
use crate::run::Run;

pub use trial::{Trial, VERSION, has_c_library};

/// A lower version than that of the packages that are looked at, from which they are upgraded.
const OLDER: &str = "0.0.9";

/// Where the packages are in the room.
const PACKAGES: &str = "/mnt";

/// Trees of the releases, and the beginning of the versions of their kernels.
const RELEASES: &[(&TreeSpec, &str)] = &[(&HEADERS_6_1, "6.1."), (&HEADERS_6_12, "6.12.")];

/// What is upgraded: of the driver there is one build in each tree.
const UPGRADED: &str = "farlane farlane-guest libfarlane0 libfarlane-dev";

/// A file of the packages that belongs to whoever runs the machine.
const CONFIGURATION: &str = "/etc/apparmor.d/usr.bin.farlane-blk";

/// Where what changes is not the packages': lists and caches of other programs, key pairs that DKMS
/// makes for itself, what systemd-analyze leaves, backups of the lists of users, a folder that
/// dh_apparmor's scripts remove when it is empty, and where other scenarios build.
const OTHERS: &[&str] = &[
    "/build",
    "/etc/.pwd.lock",
    "/etc/apparmor.d/disable",
    "/etc/group-",
    "/etc/gshadow-",
    "/etc/passwd-",
    "/etc/shadow-",
    "/etc/subgid-",
    "/etc/subuid-",
    "/run/systemd",
    "/tmp",
    "/var/cache",
    "/var/lib/apt",
    "/var/lib/dkms/mok.",
    "/var/lib/dpkg",
    "/var/log",
];

/// Has apt ask nothing, in a shell.
const APT: &str = r#"export APT_CONFIG=/tmp/apt.conf
cat >$APT_CONFIG <<END
APT::Get::Assume-Yes "true";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
END"#;

/// Renders all man pages of a package, as lintian does; prints what troff warns of.
const RENDER: &str = "for page in $(dpkg -L farlane farlane-guest | grep '/man1/.*gz$'); do
    MANROFFSEQ= MANWIDTH=80 man --warnings -E UTF-8 -l -Tutf8 -Z \"$page\" 2>&1 >/dev/null |
        sed \"s#^#$page: #\"
done";

/// A function of the shell that starts an installed daemon as its own user, whose number is `$!`
/// then, and waits until it is ready; what it has said is printed.
const START: &str = "set -e
start() {
    mkfifo /tmp/log && chmod 666 /tmp/log
    setpriv --reuid farlane --regid farlane --init-groups \"$@\" 2>/tmp/log &
    exec 3</tmp/log
    while read -r line <&3; do
        echo \"$line\"
        case $line in *Ready*) break ;; esac
    done
    rm /tmp/log
}";

/// Starts the daemon for processes of its user, and lists the device through the installed library,
/// and the daemon by the installed program.
const DEVICES: &str = "start farlane-rdma --host-socket /run/farlane/rdma/host.sock \
    --metrics /run/farlane/rdma/host.metrics
setpriv --reuid farlane --regid farlane --init-groups \
    farlane-run --socket /run/farlane/rdma/host.sock ibv_devinfo
farlane status";

/// Compiles and links the example as a stranger would, with the compiler that comes with the
/// kernel's headers: in Debian 13 it has its version in its name only.
const COMPILE: &str = "cd /tmp && cc=$(command -v cc || ls /usr/bin/gcc-[0-9]* | head -n 1) && \
     $cc -Wall -Wextra -Werror -o transfer /usr/share/doc/libfarlane-dev/examples/transfer.c \
     $(pkg-config --cflags --libs farlane) && \
     readelf -d transfer | grep NEEDED && ldd transfer && rm transfer";

pub fn run(run: &Run<'_>, report: &mut Report) -> Result<()> {
    let workspace = run.context.workspace();
    let mut trees = Vec::new();
    for (spec, kernel) in RELEASES {
        let tree = Tree::ensure(workspace, spec)?;
        if has_c_library(&tree, spec.suite, report)? {
            trees.push((tree, spec, kernel));
        }
    }
    ensure!(
        !trees.is_empty(),
        "No release's C library is as new as this machine's"
    );
    workspace.build(&["farlane-vm-front-end"])?;
    let trial = Trial::new(workspace, "package-test");
    let folder = trial.folder();
    let packages = trial.pack(VERSION)?;
    trial.pack(OLDER)?;
    for package in &packages {
        let kib = fs::metadata(package)?.len() / 1024;
        let name = package.file_name().unwrap_or_default();
        report.add(
            "Debian package",
            name.to_string_lossy(),
            format!("{kib} KiB"),
        );
    }
    for (tree, spec, kernel) in &trees {
        in_tree(run, tree, spec, kernel, folder)
            .with_context(|| format!("In Debian {}", spec.suite))?;
        report.add("Debian packages", format!("in {}", spec.suite), "work");
    }
    Ok(())
}

fn in_tree(
    run: &Run<'_>,
    tree: &Tree,
    spec: &TreeSpec,
    kernel: &str,
    packages: &Path,
) -> Result<()> {
    let release = tree.kernel_release()?;
    ensure!(
        release.starts_with(kernel),
        "{} has headers of Linux {release}",
        spec.name
    );
    let over = run.path(spec.suite);
    fs::create_dir(&over).with_context(|| format!("Cannot make {}", over.display()))?;
    let driver_of_disks = run.context.workspace().built("farlane-blk-driver")?;
    let with = [(packages, PACKAGES), (&*driver_of_disks, DRIVER)];
    let room = Room::new(tree, &over, &with, None)?;
    // Of what a tree leaves out, manuals are wanted here.
    room.run("rm -f /etc/dpkg/dpkg.cfg.d/*")?;
    let before = room.files(is_others)?;
    let step = |what: &str, act: &dyn Fn(&Room) -> Result<()>| {
        progress::step(&format!("{what} (Debian {})", spec.suite), || act(&room))
            .with_context(|| what.to_owned())
    };
    step("Installing an older version", &install_older)?;
    let client = Client::start(run, &room, spec.suite)?;
    let pages = [
        run.block("package/host")?,
        run.block("package/guest")?,
        run.block("package/verbs")?,
    ];
    step("Upgrading", &|room| upgrade(room, &pages))?;
    client.end(&room).context("Over the upgrade")?;
    step("Building the driver by DKMS", &|room| {
        driver(room, &release)
    })?;
    if spec.packages.contains(&"lintian") {
        step("Running lintian", &lintian)?;
    }
    step("Looking at units and profiles", &units_and_profiles)?;
    step("Rendering man pages", &man_pages)?;
    step("Listing devices", &devices)?;
    step("Compiling a program", &program)?;
    step("Purging", &|room| purge(room, &before))
}

fn is_others(path: &str) -> bool {
    OTHERS.iter().any(|begin| path.starts_with(begin))
}

/// Runs lines of a document that install packages with apt in their folder, without a network: what
/// they depend on is there. apt asks nothing, and installs no more than what is needed.
pub fn install(room: &Room, folder: &str, lines: &str) -> Result<()> {
    room.run(&format!("set -e\n{APT}\ncd {folder}\n{lines}"))?;
    Ok(())
}

fn install_older(room: &Room) -> Result<()> {
    let files: Vec<String> = UPGRADED
        .split_whitespace()
        .map(|name| format!("./{name}_{OLDER}_*.deb"))
        .collect();
    let line = format!("apt install {}", files.join(" "));
    install(room, &format!("{PACKAGES}/{OLDER}"), &line)?;
    room.run(&format!("echo '# ours' >>{CONFIGURATION}"))?;
    // As docs/install.md has a first disk; there is no systemd that would start it.
    room.run(
        "printf 'fd = 3\\npath = \"/srv/vm0.img\"\\n' >/etc/farlane/blk/vm0.toml && \
         systemctl --root=/ enable farlane-blk@vm0.socket",
    )?;
    Ok(())
}

/// As the documents install the packages; of libfarlane they have no line.
fn upgrade(room: &Room, lines: &[String]) -> Result<()> {
    let folder = format!("{PACKAGES}/{VERSION}");
    for lines in lines {
        install(room, &folder, lines)?;
    }
    install(room, &folder, "apt install ./libfarlane*.deb")?;
    let versions = room.run(&format!(
        "dpkg-query --show --showformat '${{Version}} ${{db:Status-Abbrev}}\\n' {UPGRADED}"
    ))?;
    ensure!(
        versions
            .lines()
            .all(|line| line.trim() == format!("{VERSION} ii")),
        "Installed after the upgrade:\n{versions}"
    );
    room.run(&format!(
        "grep -qx '# ours' {CONFIGURATION} && test -e /etc/farlane/blk/vm0.toml"
    ))
    .context("The upgrade has lost what was configured")?;
    let unit = room.run("cat /usr/lib/systemd/system/farlane-blk@.service")?;
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let start = start.context("The unit starts nothing")?;
    room.run(&format!("{} --check", start.replace("%i", "vm0")))
        .context("The unit does not start with the first disk of the documentation")?;
    Ok(())
}

fn driver(room: &Room, kernel: &str) -> Result<()> {
    // The package builds for the kernel that runs, which is this machine's, or for the newest.
    let status = || room.run(&format!("dkms status farlane/{VERSION} -k {kernel}"));
    if !status()?.contains("installed") {
        room.run(&format!("dkms install farlane/{VERSION} -k {kernel}"))?;
    }
    let status = status()?;
    ensure!(status.contains("installed"), "dkms says: {status}");
    for module in ["farlane", "farlane_ib"] {
        let magic = room.run(&format!("modinfo -k {kernel} -F vermagic {module}"))?;
        ensure!(magic.starts_with(kernel), "{module} is for {magic}");
    }
    Ok(())
}

fn lintian(room: &Room) -> Result<()> {
    let said = room.run(&format!(
        "lintian --fail-on none --allow-root {PACKAGES}/{VERSION}/*.deb"
    ))?;
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("E:")).collect();
    ensure!(errors.is_empty(), "lintian says:\n{}", errors.join("\n"));
    Ok(())
}

fn units_and_profiles(room: &Room) -> Result<()> {
    let units = room.run("dpkg -L farlane | grep '/system/farlane-'")?;
    let units: Vec<&str> = units.lines().collect();
    ensure!(!units.is_empty(), "No units are installed");
    let said = room.run(&format!("systemd-analyze verify {} 2>&1", units.join(" ")))?;
    ensure!(said.trim().is_empty(), "systemd-analyze says:\n{said}");
    for unit in units.iter().filter(|unit| unit.ends_with(".service")) {
        room.run(&format!(
            "systemd-analyze security --offline=true --threshold=30 {unit}"
        ))?;
    }
    for profile in ["blk", "borrow", "lend", "net", "rdma"] {
        room.run(&format!(
            "apparmor_parser --skip-kernel-load --skip-cache \
             /etc/apparmor.d/usr.bin.farlane-{profile}"
        ))?;
    }
    for (kind, of) in [("block", "blk"), ("net", "net")] {
        let said = room.run(&format!(
            "$(sed -n 's/.*\"binary\": \"\\(.*\\)\".*/\\1/p' \
             /usr/share/qemu/vhost-user/50-farlane-{of}.json) --print-capabilities"
        ))?;
        ensure!(said.contains(kind), "farlane-{of} says: {said}");
    }
    Ok(())
}

fn man_pages(room: &Room) -> Result<()> {
    let warnings = room.run(RENDER)?;
    ensure!(warnings.is_empty(), "troff warns:\n{}", tail(&warnings, 20));
    let page = room.run("man farlane-blk | cat")?;
    for section in ["NAME", "SYNOPSIS", "OPTIONS", "FILES", "SEE ALSO"] {
        ensure!(
            page.lines().any(|line| line == section),
            "farlane-blk(1) has no section {section}:\n{}",
            tail(&page, 20)
        );
    }
    Ok(())
}

fn devices(room: &Room) -> Result<()> {
    let said = room.run(&format!("{START}\n{DEVICES}"))?;
    ensure!(
        said.contains("hca_id:") && said.contains("PORT_ACTIVE"),
        "ibv_devinfo finds no device:\n{said}"
    );
    let row = said.lines().last().unwrap_or_default();
    let words: Vec<_> = row.split_whitespace().take(3).collect();
    ensure!(
        words == ["rdma", "host", VERSION],
        "farlane status shows:\n{said}"
    );
    Ok(())
}

fn program(room: &Room) -> Result<()> {
    let said = room.run(COMPILE)?;
    let links = said.contains("[libfarlane.so.0]") && !said.contains("not found");
    ensure!(links, "A program of libfarlane-dev needs:\n{said}");
    Ok(())
}

fn purge(room: &Room, before: &BTreeSet<String>) -> Result<()> {
    let installed = format!("farlane-dkms {UPGRADED}");
    room.run(&format!("apt-get purge --yes -qq {installed}"))?;
    let after = room.files(is_others)?;
    let left: Vec<&String> = after.difference(before).collect();
    ensure!(left.is_empty(), "Left after the purge: {left:#?}");
    let gone: Vec<&String> = before.difference(&after).collect();
    ensure!(gone.is_empty(), "Gone with the purge: {gone:#?}");
    Ok(())
}
