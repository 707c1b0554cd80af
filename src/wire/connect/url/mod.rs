//! Reads the URL of a Redis server.

pub mod sentinel;

use std::fmt;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo};

pub use sentinel::{MAX_SENTINELS, SentinelUrl};

/// Query parameters that redis-rs reads. This library refuses others, which redis-rs would ignore.
const TCP_OPTIONS: &[&str] = &["protocol"];
const UNIX_OPTIONS: &[&str] = &["db", "user", "pass", "protocol"];

/// The longest name in the DNS. A longer name from a sentinel is refused, and one from a node of a Cluster is cut.
pub const LONGEST_HOST: usize = 255;

/// The fault of a URL, for an error message.
pub struct Fault {
    what: String,
    /// Whether the message adds the form of a valid URL.
    shows_form: bool,
}

impl Fault {
    pub fn with_form(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            shows_form: true,
        }
    }

    /// A fault whose message does not add the form of a valid URL.
    pub fn without_form(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            shows_form: false,
        }
    }

    /// The message. `form` is that of a valid URL.
    pub fn explain(self, form: &str) -> String {
        let Self { what, shows_form } = self;
        match shows_form {
            true => format!(
                "{what}; it must be {form}, with other characters than letters, digits and -._~ \
                 percent-encoded in user and password"
            ),
            false => what,
        }
    }
}

/// Reads the address and the login from the URL of one server. The errors do not quote `url`: in a malformed URL, any
/// part may belong to the password.
pub fn parse(url: &str) -> Result<ConnectionInfo, String> {
    parse_single(url)
        .map_err(|fault| fault.explain("redis://user:password@host:port/database or unix:///path"))
}

/// Does the same as [`parse`], but the errors do not show the form of a valid URL.
pub fn parse_single(url: &str) -> Result<ConnectionInfo, Fault> {
    let fault = || fault(url);
    let mut parsed = redis::parse_redis_url(url).ok_or_else(fault)?;
    let has_tls = matches!(parsed.scheme(), "rediss" | "valkeys");
    let known = match parsed.scheme() {
        "unix" | "redis+unix" | "valkey+unix" => UNIX_OPTIONS,
        _ => TCP_OPTIONS,
    };
    if has_tls {
        if !cfg!(feature = "tls") {
            return Err(Fault::without_form(TLS_NEEDS_FEATURE));
        }
        if parsed.fragment() == Some("insecure") {
            return Err(Fault::without_form(INSECURE));
        }
        // redis-rs reads `rediss` only with a feature of its own.
        let changed = parsed.set_scheme("redis");
        changed.map_err(|()| fault())?;
    }
    if parsed.fragment().is_some() {
        return Err(fault());
    }
    if parsed
        .query_pairs()
        .any(|(name, _)| !known.contains(&&*name))
    {
        let what = format!("has an unknown option; known are {}", known.join(", "));
        return Err(Fault::without_form(what));
    }
    if matches!(parsed.host_str(), Some("0.0.0.0" | "[::]")) {
        return Err(Fault::without_form(WILDCARD));
    }
    let info = parsed
        .into_connection_info()
        .map_err(|error| match error.detail() {
            Some(_) => Fault::without_form(
                "has an unknown version in its option protocol; known are resp2 and resp3",
            ),
            None => fault(),
        })?;
    match info.addr() {
        // In `redis://user:password%40host`, redis-rs takes the password for a part of the host, which errors show.
        ConnectionAddr::Tcp(host, _) if host.contains('%') => Err(encoded_host(url)),
        ConnectionAddr::Tcp(host, _) if host.contains(',') => Err(several_hosts()),
        ConnectionAddr::Tcp(_, 0) => Err(Fault::with_form(PORT_0)),
        ConnectionAddr::Tcp(host, port) if has_tls => {
            let (host, port) = (host.clone(), *port);
            let addr = HostPort { host, port }.to_addr(true);
            Ok(info.set_addr(addr))
        }
        _ => Ok(info),
    }
}

/// Reads a `redis+cluster://` URL: one [`ConnectionInfo`] for each of its nodes, all with the same login. `None` if
/// `url` has another scheme.
pub fn parse_cluster(url: &str) -> Option<Result<Vec<ConnectionInfo>, String>> {
    let (scheme, rest) = url.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let single = scheme.strip_suffix("+cluster")?;
    if !matches!(single, "redis" | "rediss" | "valkey" | "valkeys") {
        return None;
    }
    let infos = parse_nodes(single, rest);
    let form = "redis+cluster://user:password@host:6379,host:6379";
    Some(infos.map_err(|fault| fault.explain(form)))
}

fn parse_nodes(scheme: &str, rest: &str) -> Result<Vec<ConnectionInfo>, Fault> {
    let HostList {
        login,
        hosts,
        behind,
    } = HostList::split(rest)?;
    let infos = hosts
        .into_iter()
        .map(|host| parse_single(&format!("{scheme}://{login}{host}{behind}")));
    let infos = infos.collect::<Result<Vec<ConnectionInfo>, Fault>>()?;
    match infos.iter().any(|info| info.redis_settings().db() != 0) {
        true => Err(Fault::without_form(
            "has a database behind the hosts, and a Cluster has only database 0; leave it out",
        )),
        false => Ok(infos),
    }
}

/// The parts of a URL with several hosts, behind its `://`.
pub struct HostList<'a> {
    /// User and password with the `@` behind them. Empty if there are none.
    pub login: &'a str,
    pub hosts: Vec<&'a str>,
    /// The path, the options and the fragment.
    pub behind: &'a str,
}

impl<'a> HostList<'a> {
    pub fn split(rest: &'a str) -> Result<Self, Fault> {
        let (authority, behind) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        if behind.contains('@') {
            return Err(Fault::with_form(MISPLACED_AT));
        }
        let (login, hosts) = match authority.rfind('@') {
            Some(at) => authority.split_at(at + 1),
            None => ("", authority),
        };
        if login.contains(',') {
            return Err(Fault::with_form(MISPLACED_LOGIN));
        }
        let hosts: Vec<&str> = hosts.split(',').collect();
        if hosts.contains(&"") {
            return Err(Fault::with_form("has an empty host"));
        }
        Ok(Self {
            login,
            hosts,
            behind,
        })
    }
}

/// The URL of a Cluster with this node, without a login.
pub fn cluster_url(info: &ConnectionInfo) -> String {
    let scheme = match info.addr() {
        ConnectionAddr::TcpTls { .. } => "rediss",
        _ => "redis",
    };
    match HostPort::of(info.addr()) {
        Some(address) => format!("{scheme}+cluster://{address}"),
        // A Cluster knows its nodes by host and port, and a Unix socket has neither.
        None => format!("{scheme}+cluster://host:port"),
    }
}

/// The host and the port of a server, a sentinel or a node of a Cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    pub host: String,
    pub port: u16,
}

impl HostPort {
    /// `None` if this cannot be an address. Also checks the addresses in replies of sentinels.
    pub fn new(host: &[u8], port: &[u8]) -> Option<Self> {
        let host = std::str::from_utf8(host).ok()?;
        let is_bad = |c: char| !c.is_ascii_graphic() || "%@/?#".contains(c);
        if host.is_empty() || host.len() > LONGEST_HOST || host.contains(is_bad) {
            return None;
        }
        let port = std::str::from_utf8(port).ok()?.parse().ok()?;
        let host = host.to_owned();
        (port != 0).then_some(Self { host, port })
    }

    /// The host and the port of `addr`. `None` for a Unix socket.
    pub fn of(addr: &ConnectionAddr) -> Option<Self> {
        match addr {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                let (host, port) = (host.clone(), *port);
                Some(Self { host, port })
            }
            _ => None,
        }
    }

    /// The address in the form of redis-rs, with TLS if `has_tls`.
    pub fn to_addr(&self, has_tls: bool) -> ConnectionAddr {
        let (host, port) = (self.host.clone(), self.port);
        match has_tls {
            false => ConnectionAddr::Tcp(host, port),
            true => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            },
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&host_and_port(&self.host, self.port))
    }
}

/// `host:port`, with brackets around an IPv6 address.
pub fn host_and_port(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

/// The schemes of URLs, with `memory` for a store without a server.
const SCHEMES: &[&str] = &[
    "redis",
    "rediss",
    "valkey",
    "valkeys",
    "unix",
    "redis+unix",
    "valkey+unix",
    "redis+cluster",
    "rediss+cluster",
    "valkey+cluster",
    "valkeys+cluster",
    "redis+sentinel",
    "rediss+sentinel",
    "valkey+sentinel",
    "valkeys+sentinel",
    "memory",
];

/// The parts of a URL behind its `://`: user and password, host and port, and the rest.
fn parts(rest: &str) -> (&str, &str, &str) {
    let (authority, behind) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, host) = authority.rsplit_once('@').unwrap_or(("", authority));
    (login, host, behind)
}

/// Describes the wrong part of an unreadable URL, without a quote from the URL.
fn fault(url: &str) -> Fault {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Fault::with_form("does not begin with redis://");
    };
    if !SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()) {
        let what = format!("has an unknown scheme; known are {}", SCHEMES.join(", "));
        return Fault::with_form(what);
    }
    if scheme.ends_with("unix") {
        return Fault::with_form("has no path, or an option db that is no number");
    }
    let (login, host, behind) = parts(rest);
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let (name, port) = match host.rsplit_once(':') {
        // The colons of an IPv6 address are in brackets.
        Some((name, port)) if !port.contains(']') => (name, port),
        _ => (host, ""),
    };
    let path = behind.split(['?', '#']).next().unwrap_or_default();
    let database = path.trim_start_matches('/');
    Fault::with_form(if behind.contains('@') {
        MISPLACED_AT
    } else if host.contains(',') {
        return several_hosts();
    } else if name.is_empty() {
        "has no host"
    } else if !port.is_empty() && port.parse::<u16>().is_err() {
        "has a port that is no number up to 65535"
    } else if !database.is_empty() && database.parse::<i64>().is_err() {
        "has a database that is no number, behind the / after the host"
    } else if behind.contains('#') {
        "has a part behind a #"
    } else if !is_utf8_encoded(password) {
        "has a password that is not UTF-8 after percent-decoding"
    } else if !is_utf8_encoded(user) {
        "has a user that is not UTF-8 after percent-decoding"
    } else if name.starts_with('[') {
        "has a host in brackets that is no IPv6 address"
    } else if name.contains(':') {
        "has a second colon behind the host; write an IPv6 address in brackets, as in [::1]:6379"
    } else {
        BAD_HOST
    })
}

/// The fault of a URL whose host has a `%` once it is parsed: the parser percent-encodes characters that are not ASCII.
fn encoded_host(url: &str) -> Fault {
    let (_, rest) = url.split_once("://").unwrap_or_default();
    let (_, host, _) = parts(rest);
    Fault::with_form(if host.contains('%') {
        "has a % in the host"
    } else if !host.is_ascii() {
        "has a host with characters that are not ASCII; write its ASCII form, which begins with xn--"
    } else {
        BAD_HOST
    })
}

/// The fault of a URL of one server that has several hosts.
fn several_hosts() -> Fault {
    Fault::without_form(
        "has several hosts; use redis+cluster://host,host for the nodes of a Cluster, or \
         redis+sentinel://host,host/name for sentinels",
    )
}

/// Whether the bytes of `text` are UTF-8 after percent-decoding.
fn is_utf8_encoded(text: &str) -> bool {
    percent_decode_str(text).decode_utf8().is_ok()
}

const BAD_HOST: &str = "has a host with a character that is not allowed there";
const WILDCARD: &str = "has a host that stands for all addresses of a machine, on which servers listen; connect to one \
     of them: 127.0.0.1 (or [::1]) for this machine";
const PORT_0: &str = "has the port 0, where no server can listen";
const MISPLACED_LOGIN: &str = "has a comma before an @; put user and password before the first host, and write a \
     comma in them as %2C";
const MISPLACED_AT: &str =
    "has an @ behind a /, ? or #; in user and password, write these as %2F, %3F and %23";
pub const TLS_NEEDS_FEATURE: &str =
    "asks for TLS, which needs leasehold's cargo feature `tls`; enable it in Cargo.toml";
const INSECURE: &str = "asks for TLS without a check of certificates, which is not supported; give the issuer's \
     certificate with TlsConfig::ca_pem instead";

/// Returns the reason if this client cannot connect to an address. The reason does not quote the address, since
/// redis-rs may have taken a part of a password for the host.
pub fn check_address(info: &ConnectionInfo) -> Result<(), &'static str> {
    match info.addr() {
        ConnectionAddr::TcpTls { .. } if !cfg!(feature = "tls") => Err(TLS_NEEDS_FEATURE),
        ConnectionAddr::TcpTls { insecure: true, .. } => Err(INSECURE),
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } if host.is_empty() => {
            Err("has no host")
        }
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. }
            if host.contains(['%', '@', '/', ',']) =>
        {
            Err("has a %, an @, a / or a comma in the host")
        }
        ConnectionAddr::Tcp(_, 0) | ConnectionAddr::TcpTls { port: 0, .. } => Err(PORT_0),
        ConnectionAddr::Tcp(..) | ConnectionAddr::TcpTls { .. } => Ok(()),
        ConnectionAddr::Unix(_) if cfg!(unix) => Ok(()),
        ConnectionAddr::Unix(_) => Err("Unix sockets are not supported on this system"),
        _ => Err("is of a kind that this version does not know"),
    }
}

/// The address without user and password, for debug output.
pub fn redacted_info(info: &ConnectionInfo) -> String {
    check_address(info).map_or_else(|_| "***".to_owned(), |()| address(info))
}

/// The URL without user, password and options, for debug output.
pub fn redacted(url: &str) -> String {
    if let Some(group) = SentinelUrl::parse(url) {
        return group.map_or_else(|_| "***".to_owned(), |group| group.redacted());
    }
    let infos = match parse_cluster(url) {
        Some(infos) => infos,
        None => parse(url).map(|info| vec![info]),
    };
    let addresses = |infos: Vec<ConnectionInfo>| {
        let addresses: Vec<String> = infos.iter().map(address).collect();
        addresses.join(",")
    };
    infos.map_or_else(|_| "***".to_owned(), addresses)
}

/// The address for messages: `host:port`, with brackets around an IPv6 address, or the path of a socket. The path is
/// cut at the first character that may begin a misplaced option.
pub fn address(info: &ConnectionInfo) -> String {
    let addr = info.addr().to_string();
    match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            return host_and_port(host, *port);
        }
        ConnectionAddr::Unix(_) => {}
        _ => return addr,
    }
    match addr.split_once(['?', '&', ';', '=', '@', '%']) {
        Some((path, _)) => format!("{path}.."),
        None => addr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_parsed_as_by_redis_rs() {
        let info = parse("redis://user:pa%20ss@host:7000/3?protocol=resp2").unwrap();
        let settings = info.redis_settings();
        assert_eq!(settings.username(), Some("user"));
        assert_eq!(settings.password(), Some("pa ss"));
        assert_eq!(settings.db(), 3);
        assert!(parse("unix:///run/redis.sock?db=2&pass=x").is_ok());
        assert!(parse("valkey://host").is_ok());
    }

    #[test]
    fn a_cluster_has_several_hosts() {
        let infos = |url| parse_cluster(url).unwrap();
        let two = infos("redis+cluster://user:pa%2Css@one,[::1]:7001").unwrap();
        let addresses: Vec<String> = two.iter().map(address).collect();
        assert_eq!(addresses, ["one:6379", "[::1]:7001"]);
        for info in &two {
            assert_eq!(info.redis_settings().username(), Some("user"));
            assert_eq!(info.redis_settings().password(), Some("pa,ss"));
        }
        assert_eq!(infos("redis+cluster://h:7000/0").unwrap().len(), 1);
        for (url, part) in [
            ("redis+cluster://", "has an empty host"),
            ("redis+cluster://a,,b", "has an empty host"),
            (
                "redis+cluster://a,u:p@b",
                "has a comma before an @; put user",
            ),
            ("redis+cluster://a:port", "it must be redis+cluster://user:"),
            ("redis+cluster://a:1,b:port", "has a port that is no number"),
            ("redis+cluster://a:1,b:0", "has the port 0"),
            ("redis+cluster://a,b/1", "a Cluster has only database 0"),
            ("redis+cluster://:p/w@a,b", "has an @ behind a /"),
            ("redis+cluster://a,b?protocol=9", "an unknown version"),
        ] {
            let error = infos(url).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
        }
        assert!(parse_cluster("redis://a").is_none());
        assert!(parse_cluster("http+cluster://a").is_none());
        assert_eq!(redacted("redis+cluster://:secret@a:1,b:2"), "a:1,b:2");
    }

    #[test]
    fn errors_name_the_part_that_is_wrong() {
        const AT: &str = "has an @ behind a /, ? or #;";
        for (url, part) in [
            ("localhost:6379", "does not begin with redis://"),
            ("", "does not begin with redis://"),
            (
                "http://h",
                "has an unknown scheme; known are redis, rediss,",
            ),
            (
                "redis://h:99999",
                "has a port that is no number up to 65535",
            ),
            ("redis://u:p@h:port/0", "has a port that is no number"),
            ("redis://[::1]:port", "has a port that is no number"),
            ("redis://h/zero", "has a database that is no number"),
            ("redis://h:1/0/1", "has a database that is no number"),
            ("redis://:a/b@h", AT),
            ("redis://:a#b@h", AT),
            ("redis://u:a?b@h", AT),
            ("redis://", "has no host"),
            ("redis://u:p@", "has no host"),
            ("redis://h#x", "has a part behind a #"),
            ("redis://h:0", "has the port 0"),
            (
                "redis://u:p@0.0.0.0:6379",
                "stands for all addresses of a machine",
            ),
            (
                "redis://[0:0::0]/1",
                "stands for all addresses of a machine",
            ),
            ("redis://h,i", "has several hosts; use redis+cluster:"),
            ("redis://u:p@h:1,i:2", "has several hosts; use"),
            ("redis://h:1,i/zero", "has several hosts; use"),
            ("redis://:a,b/c@h", AT),
            (
                "redis://b\u{fc}cher",
                "has a host with characters that are not",
            ),
            ("redis://b\u{fc}%41", "has a % in the host"),
            (
                "redis://h\u{1}i",
                "has a host with a character that is not allowed there",
            ),
            (
                "redis://h i:1",
                "has a host with a character that is not allowed there",
            ),
            (
                "redis://u:p@::1:6379",
                "has a second colon behind the host; write an",
            ),
            (
                "redis://h:1:2/0",
                "has a second colon behind the host; write an",
            ),
            (
                "redis://[h]:1",
                "has a host in brackets that is no IPv6 address",
            ),
            ("redis://:p%ff@h", "has a password that is not UTF-8 after"),
            (
                "redis://u%c3:p%c3%bc@h",
                "has a user that is not UTF-8 after",
            ),
            (
                "redis://u%c3%bc:%zz%@[h]",
                "has a host in brackets that is no",
            ),
            ("unix:///x?db=zero", "an option db that is no number"),
            (
                "redis://h?protocol=9",
                "an unknown version in its option protocol",
            ),
            (
                "redis://h?db=1",
                "has an unknown option; known are protocol",
            ),
        ] {
            let error = parse(url).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
        }
    }
}
