//! Reads URLs of groups of servers that sentinels watch.

use redis::{ConnectionAddr, ConnectionInfo};

use crate::wire::connect::url;
use crate::wire::connect::url::{Fault, HostList, HostPort};

/// The greatest number of sentinels in a URL, and of sentinels that a client knows.
pub const MAX_SENTINELS: usize = 64;
const DEFAULT_PORT: u16 = 26379;

/// `redis+sentinel://[user:password@]host[:port][,host..]/group[/database]`, or `rediss+sentinel://..`.
#[derive(Debug)]
pub struct SentinelUrl {
    /// The login, the database and the protocol for the servers. The address in `info` is that of the first sentinel.
    pub info: ConnectionInfo,
    pub hosts: Vec<HostPort>,
    /// The name in `sentinel monitor <name> ..`.
    pub group: String,
    pub has_tls: bool,
}

const FORM: &str = "redis+sentinel://user:password@host:26379,host:26379/name/database";

impl SentinelUrl {
    /// Returns `None` for a URL of another scheme. The errors do not quote `url`: in a malformed URL, any part may
    /// belong to the password.
    pub fn parse(url: &str) -> Option<Result<Self, String>> {
        let (scheme, rest) = url.split_once("://")?;
        let has_tls = match scheme.to_ascii_lowercase().as_str() {
            "redis+sentinel" | "valkey+sentinel" => false,
            "rediss+sentinel" | "valkeys+sentinel" => true,
            _ => return None,
        };
        if has_tls && !cfg!(feature = "tls") {
            return Some(Err(url::TLS_NEEDS_FEATURE.to_owned()));
        }
        Some(Self::read(rest, has_tls).map_err(|fault| fault.explain(FORM)))
    }

    /// Reads the part behind `://`.
    fn read(rest: &str, has_tls: bool) -> Result<Self, Fault> {
        let HostList {
            login,
            hosts,
            behind,
        } = HostList::split(rest)?;
        if behind.contains('#') {
            return Err(Fault::with_form("has a part behind a #"));
        }
        let (path, query) = match behind.split_once('?') {
            Some((path, query)) => (path, format!("?{query}")),
            None => (behind, String::new()),
        };
        let mut parts = path.strip_prefix('/').unwrap_or(path).splitn(2, '/');
        let group = parts.next().unwrap_or_default();
        let database = parts.next().unwrap_or_default();
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if group.is_empty() {
            return Err(Fault::with_form(
                "has no name of a group behind the hosts, as in `sentinel monitor <name>`",
            ));
        }
        if !group.chars().all(is_name) {
            return Err(Fault::with_form(
                "has a name of a group with other characters than letters, digits and -._",
            ));
        }
        if hosts.len() > MAX_SENTINELS {
            let what = format!(
                "has more than {MAX_SENTINELS} hosts; name some, and the client learns of the others"
            );
            return Err(Fault::without_form(what));
        }
        let mut infos = Vec::new();
        for host in hosts {
            // redis-rs reads each host in the URL of a single server.
            let port = match host.rsplit_once(':') {
                Some((_, port)) if !port.contains(']') => String::new(),
                _ => format!(":{DEFAULT_PORT}"),
            };
            let single = format!("redis://{login}{host}{port}/{database}{query}");
            infos.push(url::parse_single(&single)?);
        }
        let mut hosts = Vec::new();
        for info in &infos {
            let ConnectionAddr::Tcp(host, port) = info.addr() else {
                return Err(Fault::with_form("has an invalid host"));
            };
            let host = HostPort::new(host.as_bytes(), port.to_string().as_bytes());
            let fault = || Fault::with_form("has an invalid host");
            let host = host.ok_or_else(fault)?;
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        let info = infos.swap_remove(0);
        let addr = hosts[0].to_addr(has_tls);
        Ok(Self {
            info: info.set_addr(addr),
            hosts,
            group: group.to_owned(),
            has_tls,
        })
    }

    /// The URL without user, password, database and options.
    pub fn redacted(&self) -> String {
        redacted(&self.hosts, &self.group, self.has_tls)
    }
}

/// The URL of a group, without user, password, database and options.
pub fn redacted(hosts: &[HostPort], group: &str, has_tls: bool) -> String {
    let hosts: Vec<String> = hosts.iter().map(HostPort::to_string).collect();
    let scheme = if has_tls { "rediss" } else { "redis" };
    format!("{scheme}+sentinel://{}/{group}", hosts.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<SentinelUrl, String> {
        SentinelUrl::parse(url).unwrap()
    }

    #[test]
    fn a_url_has_hosts_group_and_login() {
        let url = parse(
            "redis+sentinel://me:pa%20ss@h1,h2:7,[::1]:8,[::2],h1:26379/my.group/3?protocol=resp3",
        );
        let url = url.unwrap();
        let settings = url.info.redis_settings();
        assert_eq!(settings.username(), Some("me"));
        assert_eq!(settings.password(), Some("pa ss"));
        assert_eq!(settings.db(), 3);
        let shown = "redis+sentinel://h1:26379,h2:7,[::1]:8,[::2]:26379/my.group";
        assert_eq!(url.redacted(), shown);
        assert!(parse("redis+sentinel://h/g/").is_ok());
        assert!(parse("valkey+sentinel://h/g").is_ok());
        assert!(SentinelUrl::parse("redis://h/0").is_none());
    }

    #[test]
    fn errors_name_the_part_that_is_wrong() {
        let many = vec!["h"; MAX_SENTINELS + 1].join(",");
        let many = format!("//{many}/g");
        for (url, part) in [
            ("//h", "has no name of a group behind the hosts"),
            ("//h/", "has no name of a group behind the hosts"),
            ("//h//0", "has no name of a group"),
            ("//h/a%20b", "a group with other characters than"),
            ("//h,,i/g", "has an empty host"),
            ("///g", "has an empty host"),
            (
                "//i,u:secret@h/g",
                "has a comma before an @; put user and password before",
            ),
            ("//u:sec,ret@h/g", "has a comma before an @"),
            ("//u:p@/g", "has an empty host"),
            ("//h,i:99999/g", "has a port that is no number up to 65535"),
            ("//h:0/g", "has the port 0"),
            (
                "//h,b\u{fc}cher/g",
                "has a host with characters that are not ASCII",
            ),
            (
                "//:secret%ff@h/g",
                "has a password that is not UTF-8 after percent-decoding",
            ),
            ("//h/g/zero", "has a database that is no number"),
            ("//h/g/0/1", "has a database that is no number"),
            ("//:secret/x@h/g", "has an @ behind a /, ? or #"),
            ("//:a#secret@h/g", "has an @ behind a /, ? or #"),
            ("//h/g#x", "has a part behind a #"),
            ("//h/g?db=1", "has an unknown option; known are protocol"),
            ("//:secret%40h/g", "has no host"),
            ("//secret%40h/g", "has a % in the host"),
            (&many, "has more than 64 hosts"),
        ] {
            let error = parse(&format!("redis+sentinel:{url}")).unwrap_err();
            assert!(error.contains(part), "{url}: {error}");
            assert!(!error.contains("secret"), "{url}: {error}");
        }
        let most = vec!["h"; MAX_SENTINELS].join(",");
        assert!(parse(&format!("redis+sentinel://{most}/g")).is_ok());
    }

    #[test]
    fn tls_needs_the_feature() {
        match parse("rediss+sentinel://h/g") {
            Ok(url) => assert!(cfg!(feature = "tls") && url.has_tls),
            Err(error) => assert!(!cfg!(feature = "tls") && error.contains("`tls`"), "{error}"),
        }
    }
}
