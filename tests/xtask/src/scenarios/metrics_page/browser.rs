//! A browser without a person: Debian's Chromium, driven by its WebDriver (W3C WebDriver).

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::Network;
use farlane_kit::process::{Process, check_output, output};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::conditions::wait_until;
use crate::run::Run;

/// Packages that it needs.
pub const PACKAGES: &[&str] = &["chromium", "chromium-driver", "curl"];
/// How long one command may take, in seconds.
const SECONDS: &str = "60";
const TIMEOUT: Duration = Duration::from_secs(90);
/// Its own port, in the network.
const PORT: u16 = 9515;
/// As little as possible of what it would do by itself.
const ARGUMENTS: &[&str] = &[
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
];

/// A browser with one page. It ends when this is dropped.
pub struct Browser<'a> {
    network: &'a Network,
    driver: Process,
    session: String,
    /// Its version.
    pub version: String,
}

impl<'a> Browser<'a> {
    /// Starts it in a network.
    pub fn start(run: &Run<'_>, network: &'a Network) -> Result<Self> {
        let mut command = Command::new("unshare");
        // What it starts is in groups of its own, and ends with this namespace of processes.
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["chromedriver", &format!("--port={PORT}")]);
        command.env("HOME", run.path("home"));
        // What Chromium leaves behind when it is killed goes with the run.
        let temporary = run.path("tmp");
        fs::create_dir_all(&temporary).with_context(|| temporary.display().to_string())?;
        command.env("TMPDIR", temporary);
        let log = run.logs().join("chromedriver.log");
        let driver = Process::spawn_logged("chromedriver", network.within(&command), &log)?;
        let mut browser = Self {
            network,
            driver,
            session: String::new(),
            version: String::new(),
        };
        wait_until("chromedriver to be ready", || {
            ensure!(browser.driver.is_running()?, "chromedriver has ended");
            let told = browser.curl("GET", "/status", None).unwrap_or_default();
            Ok(told["ready"] == true)
        })?;
        let profile = format!("--user-data-dir={}", run.path("chromium").display());
        let arguments: Vec<_> = ARGUMENTS.iter().copied().chain([&*profile]).collect();
        let options = json!({
            "browserName": "chrome",
            "goog:loggingPrefs": { "browser": "ALL" },
            "goog:chromeOptions": { "args": arguments },
        });
        let wanted = json!({ "capabilities": { "alwaysMatch": options } });
        let made = browser.curl("POST", "/session", Some(&wanted))?;
        let session = made["sessionId"].as_str().context("It has no session")?;
        browser.session = format!("/session/{session}");
        let version = made["capabilities"]["browserVersion"].as_str();
        browser.version = version.unwrap_or_default().to_owned();
        Ok(browser)
    }

    /// Sends a command, and returns its value.
    fn curl(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", SECONDS]);
        command.args(["--request", method]);
        if let Some(body) = body {
            command.args(["--header", "Content-Type: application/json"]);
            command.arg("--data-raw").arg(body.to_string());
        }
        command.arg(format!("http://127.0.0.1:{PORT}{path}"));
        let said = check_output("curl", self.network.within(&command), TIMEOUT)?;
        let mut said: Value = serde_json::from_str(&said).context("WebDriver says no JSON")?;
        let value = said["value"].take();
        ensure!(value["error"].is_null(), "{method} {path}: {value}");
        Ok(value)
    }

    fn post(&self, command: &str, body: &Value) -> Result<Value> {
        self.curl("POST", &format!("{}/{command}", self.session), Some(body))
    }

    /// Goes to an address.
    pub fn open(&self, url: &str) -> Result<()> {
        self.post("url", &json!({ "url": url })).map(drop)
    }

    /// Runs the body of a function in the page, and returns what that returns.
    pub fn evaluate<T: DeserializeOwned>(&self, script: &str, arguments: &[&str]) -> Result<T> {
        let value = self.post(
            "execute/sync",
            &json!({ "script": script, "args": arguments }),
        )?;
        serde_json::from_value(value.clone()).with_context(|| format!("It returns {value}"))
    }

    /// Has the page be looked at by somebody who prefers `light` or `dark`.
    pub fn prefer(&self, scheme: &str) -> Result<()> {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        let command = json!({
            "cmd": "Emulation.setEmulatedMedia",
            "params": { "features": features },
        });
        self.post("goog/cdp/execute", &command).map(drop)
    }

    /// What it has complained of since this was last asked.
    pub fn complaints(&self) -> Result<Vec<String>> {
        let log = self.post("se/log", &json!({ "type": "browser" }))?;
        let entries = log.as_array().context("Its log is no list")?;
        let messages = entries.iter().filter_map(|entry| entry["message"].as_str());
        Ok(messages.map(str::to_owned).collect())
    }

    /// What is to be seen, as PNG.
    pub fn screenshot(&self) -> Result<Vec<u8>> {
        let value = self.curl("GET", &format!("{}/screenshot", self.session), None)?;
        let text = value.as_str().context("It makes no picture")?;
        let encoded = farlane_kit::scratch::Scratch::new()?;
        let path = encoded.join("screenshot");
        fs::write(&path, text)?;
        let mut command = Command::new("base64");
        command.arg("--decode").arg(&path);
        let output = output("base64", command, TIMEOUT)?;
        ensure!(
            output.status.success() && output.stdout.starts_with(b"\x89PNG\r\n\x1a\n"),
            "It is no picture"
        );
        Ok(output.stdout)
    }
}

impl Drop for Browser<'_> {
    fn drop(&mut self) {
        // Chromium ends before its folders are removed.
        if !self.session.is_empty()
            && let Err(error) = self.curl("DELETE", &self.session, None)
        {
            eprintln!("{error:#}");
        }
        if let Err(error) = self.driver.kill() {
            eprintln!("{error:#}");
        }
    }
}
