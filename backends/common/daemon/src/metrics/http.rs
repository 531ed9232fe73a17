//! Requests and responses, HTTP/1.1 as far as metrics and their page need it: `GET` and `HEAD`, a
//! connection for each.

use super::{Collect, add_own, page};
use crate::stream::MAX_REQUEST;

/// Most header fields of a request.
const MAX_FIELDS: usize = 64;

/// What OpenMetrics text is called (OpenMetrics 1.0.0, "Content-Type").
pub(super) const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// In every answer: it is what it is called, of now, and for no other site (RFC 9111, 5.2.2.5;
/// Fetch, "X-Content-Type-Options" and "Cross-Origin-Resource-Policy").
const GUARDS: &str = "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n\
     Cross-Origin-Resource-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\n";

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// The metrics, as OpenMetrics or for Prometheus, or only what comes before them.
    Metrics { is_open: bool, is_head: bool },
    /// A file of the page, or only what comes before it.
    Page { file: page::File, is_head: bool },
    /// Something that is refused so.
    Nothing(&'static str),
}

/// Whether a request is for an address, or this host by its own name: a page of the web that has
/// its name lead here says that name (DNS rebinding).
fn is_for_this_host(host: &[u8]) -> bool {
    let host = str::from_utf8(host).unwrap_or_default().trim();
    let is_port = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) => name,
        _ => host,
    };
    let address = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    let is_address = address.unwrap_or(name).parse::<std::net::IpAddr>().is_ok();
    is_address || name.eq_ignore_ascii_case("localhost")
}

fn parse(request: &[u8]) -> Asked {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(request) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if request.len() > MAX_REQUEST => {
            return Asked::Nothing("431 Request Header Fields Too Large");
        }
        Err(httparse::Error::TooManyHeaders) => {
            return Asked::Nothing("431 Request Header Fields Too Large");
        }
        Ok(httparse::Status::Partial) | Err(_) => return Asked::Nothing("400 Bad Request"),
    }
    let method = parsed.method.unwrap_or_default();
    if !["GET", "HEAD"].contains(&method) {
        return Asked::Nothing("405 Method Not Allowed\r\nAllow: GET, HEAD");
    }
    let named = |name: &'static str| {
        let fields = parsed.headers.iter();
        fields.filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    // Also at a UNIX socket, to which a forwarded port may lead.
    if !named("host").all(|field| is_for_this_host(field.value)) {
        return Asked::Nothing("403 The Host is to be localhost or an address");
    }
    let path = parsed.path.unwrap_or_default();
    // A whole address is as good as its path (RFC 9112, 3.2.2).
    let path = match path.strip_prefix("http://") {
        Some(address) => address.find('/').map_or("/", |at| &address[at..]),
        None => path,
    };
    let path = path.split('?').next().unwrap_or_default();
    let is_head = method == "HEAD";
    if let Some(file) = page::File::at(path) {
        return Asked::Page { file, is_head };
    }
    if path != "/metrics" {
        return Asked::Nothing("404 Not Found");
    }
    let is_open = |field: &httparse::Header<'_>| {
        let value = field.value;
        value
            .windows(OPEN_METRICS.len())
            .any(|part| part == OPEN_METRICS.as_bytes())
    };
    Asked::Metrics {
        is_open: named("accept").any(is_open),
        is_head,
    }
}

/// The answer to a request.
pub(super) fn answer(request: &[u8], collect: &Collect) -> String {
    match parse(request) {
        Asked::Metrics { is_open, is_head } => {
            let mut metrics = collect();
            add_own(&mut metrics);
            let (text, kind) = match is_open {
                true => (metrics.open_metrics(), OPEN_METRICS_TYPE),
                false => (metrics.prometheus(), PROMETHEUS_TYPE),
            };
            message("200 OK", kind, &text, is_head)
        }
        Asked::Page { file, is_head } => {
            let status = format!("200 OK\r\nContent-Security-Policy: {}", page::POLICY);
            message(&status, file.content_type(), &file.text(), is_head)
        }
        Asked::Nothing(status) => {
            let text = format!("{}\n", status.lines().next().unwrap_or_default());
            let is_head = request.starts_with(b"HEAD ");
            message(status, "text/plain", &text, is_head)
        }
    }
}

/// A response (RFC 9112, 2.1). Fields may stand behind the status.
fn message(status: &str, kind: &str, text: &str, is_head: bool) -> String {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{GUARDS}\
         Connection: close\r\n\r\n",
        text.len()
    );
    if is_head { head } else { head + text }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, Sample};
    use super::*;
    use std::sync::Arc;

    fn collect() -> Collect {
        Arc::new(|| {
            let mut metrics = Metrics::default();
            let calls = Sample::counter("calls", "All of them.", u64::MAX);
            metrics.add("farlane", &[], [calls]);
            metrics
        })
    }

    #[test]
    fn what_is_no_question_has_a_refusal() {
        let asked = |text: &str| match parse(text.as_bytes()) {
            Asked::Nothing(status) => status.split(' ').next().unwrap().to_owned(),
            Asked::Metrics { is_open, is_head } => format!("{is_open} {is_head}"),
            Asked::Page { file, is_head } => format!("{file:?} {is_head}"),
        };
        for (request, said) in [
            ("GET /metrics HTTP/1.1\r\n\r\n", "false false"),
            ("HEAD /metrics HTTP/1.0\r\n\r\n", "false true"),
            ("HEAD / HTTP/1.0\r\n\r\n", "Html true"),
            ("GET /page.css?x HTTP/1.1\r\n\r\n", "Css false"),
            ("GET http://x/page.js HTTP/1.1\r\n\r\n", "Js false"),
            ("GET /../page.js HTTP/1.1\r\n\r\n", "404"),
            ("GET /page/page.js HTTP/1.1\r\n\r\n", "404"),
            ("GET /favicon.ico HTTP/1.1\r\n\r\n", "404"),
            ("POST / HTTP/1.1\r\n\r\n", "405"),
            (
                "GET /metrics?x=y HTTP/1.1\r\nACCEPT: text/plain;q=0.1,application/openmetrics-text\
                 ;version=1.0.0\r\n\r\n",
                "true false",
            ),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("GET /other HTTP/1.1\r\n\r\n", "404"),
            (
                "GET http://x:1/metrics HTTP/1.1\r\nHost: [::1]:9100\r\n\r\n",
                "false false",
            ),
            (
                "GET /metrics HTTP/1.1\r\nHost: LOCALHOST:9100\r\n\r\n",
                "false false",
            ),
            ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "Html false"),
            (
                "GET /metrics HTTP/1.1\r\nHost: rebound.example:9100\r\n\r\n",
                "403",
            ),
            (
                "GET / HTTP/1.1\r\nHost: rebound.example:9100\r\n\r\n",
                "403",
            ),
            ("GET / HTTP/1.1\r\nhost: 127.0.0.1.example\r\n\r\n", "403"),
            ("GET /metrics HTTP/1.1\r\nHost", "400"),
            ("", "400"),
            ("metrics, please\n\n", "400"),
        ] {
            assert_eq!(asked(request), said, "{request}");
        }
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65));
        assert_eq!(asked(&many), "431");
        let long = format!("GET / HTTP/1.1\r\nA: {}", "b".repeat(MAX_REQUEST));
        assert_eq!(asked(&long), "431");
        let refusal = answer(b"PUT / HTTP/1.1\r\n\r\n", &collect());
        let allowed = "HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\n";
        assert!(refusal.starts_with(allowed), "{refusal}");
        assert!(refusal.ends_with("\r\n\r\n405 Method Not Allowed\n"));
        let refused = answer(b"HEAD /x HTTP/1.1\r\n\r\n", &collect());
        assert!(refused.ends_with("\r\n\r\n"), "{refused}");
        let head = answer(b"HEAD / HTTP/1.1\r\n\r\n", &collect());
        assert!(head.ends_with("Connection: close\r\n\r\n"), "{head}");
    }

    #[test]
    fn the_page_is_served_with_a_policy_that_has_nothing_else_run() {
        for (path, kind) in [
            ("/", "text/html; charset=utf-8"),
            ("/page.css", "text/css; charset=utf-8"),
            ("/page.js", "text/javascript; charset=utf-8"),
        ] {
            let asked = |method| {
                let request = format!("{method} {path} HTTP/1.1\r\nHost: [::1]:1\r\n\r\n");
                answer(request.as_bytes(), &collect())
            };
            let whole = asked("GET");
            let (head, text) = whole.split_once("\r\n\r\n").unwrap();
            assert_eq!(asked("HEAD"), format!("{head}\r\n\r\n"));
            let length = format!("Content-Length: {}", text.len());
            let kind = format!("Content-Type: {kind}");
            let policy = "Content-Security-Policy: default-src 'none'; script-src 'self'; \
                          style-src 'self'; connect-src 'self'; base-uri 'none'; form-action \
                          'none'; frame-ancestors 'none'";
            for field in [
                "HTTP/1.1 200 OK",
                policy,
                &kind,
                &length,
                "X-Content-Type-Options: nosniff",
                "Cache-Control: no-store",
                "Cross-Origin-Resource-Policy: same-origin",
                "Connection: close",
            ] {
                let count = head.split("\r\n").filter(|line| *line == field).count();
                assert_eq!(count, 1, "{field} in {head}");
            }
        }
        // A page of the web cannot take metrics or refusals for scripts of its own either.
        for path in ["/metrics", "/other"] {
            let request = format!("GET {path} HTTP/1.1\r\n\r\n");
            let said = answer(request.as_bytes(), &collect());
            assert!(
                said.contains("\r\nX-Content-Type-Options: nosniff\r\n"),
                "{said}"
            );
        }
    }
}
