//! The settings of the connection: from arguments, a file, and the environment, in this order. A password is never
//! accepted as an argument, since other users of the machine can see arguments.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;
use std::{env, env::VarError, fs};

use leasehold::{Builder, Client, Credentials, OtherLibrary, TlsConfig};

use crate::args::Connection;
use crate::exit::Failure;
use crate::time::duration;

/// The settings that a file and the environment may contain. docs/cli.md lists them.
const NAMES: [&str; 15] = [
    "LEASEHOLD_URL",
    "LEASEHOLD_PREFIX",
    "LEASEHOLD_COMPATIBLE_WITH",
    "LEASEHOLD_TTL",
    "LEASEHOLD_MAX_TTL",
    "LEASEHOLD_CONNECT_TIMEOUT",
    "LEASEHOLD_COMMAND_TIMEOUT",
    "LEASEHOLD_OUTAGE_TIMEOUT",
    "LEASEHOLD_REPLICAS",
    "LEASEHOLD_TLS_CA",
    "LEASEHOLD_TLS_CERT",
    "LEASEHOLD_TLS_KEY",
    "LEASEHOLD_TLS_NAME",
    "LEASEHOLD_SENTINEL_USER",
    "LEASEHOLD_SENTINEL_PASSWORD",
];
/// The default ttl, which is also that of the library.
const TTL: Duration = Duration::from_secs(30);
/// The default of `max_ttl` on a quorum, which is also that of the library.
const QUORUM_MAX_TTL: Duration = Duration::from_secs(30);
/// The maximum time of one `WAIT` for replicas.
const REPLICAS_TIMEOUT: Duration = Duration::from_millis(100);

/// The settings of a connection.
pub struct Settings {
    urls: Vec<String>,
    prefix: Option<String>,
    /// The other library whose locks the client excludes.
    pub other_library: Option<OtherLibrary>,
    values: HashMap<&'static str, String>,
    /// The ttl of locks.
    pub ttl: Duration,
}

fn other_library(name: &str) -> Result<OtherLibrary, Failure> {
    match name {
        "plain-keys" => Ok(OtherLibrary::PlainKeys),
        "python-redis-lock" => Ok(OtherLibrary::PythonRedisLock),
        "redisson" => Ok(OtherLibrary::Redisson { fenced: false }),
        "redisson-fenced" => Ok(OtherLibrary::Redisson { fenced: true }),
        _ => Err(Failure::usage(format!(
            "--compatible-with is plain-keys, python-redis-lock, redisson or redisson-fenced, not {name:?}"
        ))),
    }
}

impl Settings {
    /// Reads the file and the environment. `ttl` overrides both.
    pub fn read(connection: &Connection, ttl: Option<Duration>) -> Result<Self, Failure> {
        for url in &connection.url {
            refuse_password(url)?;
        }
        let mut values = HashMap::new();
        for name in NAMES {
            match env::var(name) {
                Ok(value) => drop(values.insert(name, value)),
                Err(VarError::NotPresent) => {}
                // A prefix that is not UTF-8 must not be ignored: the lock would get another key, and exclude nothing.
                Err(error) => return Err(Failure::usage(format!("{name}: {error}"))),
            }
        }
        if let Some(path) = &connection.config {
            values.extend(read_file(path)?);
        }
        let library = connection.compatible_with.clone().or_else(|| {
            let library = values.remove("LEASEHOLD_COMPATIBLE_WITH");
            library.filter(|library| !library.is_empty())
        });
        // An empty value counts as unset. But beside another library, the prefix is often empty.
        values.retain(|name, value| {
            !value.is_empty() || *name == "LEASEHOLD_PREFIX" && library.is_some()
        });
        let urls = match connection.url.is_empty() {
            false => connection.url.clone(),
            true => {
                let urls = values.get("LEASEHOLD_URL").map_or("", String::as_str);
                urls.split_whitespace().map(str::to_owned).collect()
            }
        };
        if urls.is_empty() {
            return Err(Failure::usage(
                "no address of Redis: set LEASEHOLD_URL, for example to redis://127.0.0.1:6379, or use --url or --config",
            ));
        }
        let prefix = connection.prefix.clone();
        let mut settings = Self {
            urls,
            other_library: library.as_deref().map(other_library).transpose()?,
            prefix: prefix.or_else(|| values.remove("LEASEHOLD_PREFIX")),
            values,
            ttl: TTL,
        };
        settings.ttl = match ttl {
            Some(ttl) => ttl,
            None => settings.duration("LEASEHOLD_TTL")?.unwrap_or(TTL),
        };
        Ok(settings)
    }

    fn duration(&self, name: &'static str) -> Result<Option<Duration>, Failure> {
        let value = self.values.get(name).map(|value| duration(value));
        let named = |error| Failure::usage(format!("{name}: {error}"));
        value.transpose().map_err(named)
    }

    /// The ttl of a lock that is held for a check: at least `least` and this number of command time-outs, as far as
    /// `max_ttl` allows that.
    pub fn probe_ttl(&self, least: Duration, timeouts: u32) -> Result<Duration, Failure> {
        let timeout = self.duration("LEASEHOLD_COMMAND_TIMEOUT")?;
        let wanted = least.max(timeouts * timeout.unwrap_or_default());
        let most = match (self.duration("LEASEHOLD_MAX_TTL")?, &self.urls[..]) {
            (Some(most), _) => most,
            (None, [_]) => Duration::MAX,
            (None, _) => QUORUM_MAX_TTL,
        };
        Ok(wanted.min(most))
    }

    /// Returns the builder of a client with these settings.
    pub fn builder(&self) -> Result<Builder, Failure> {
        let mut builder = match &self.urls[..] {
            [url] => Client::builder(url),
            urls => Client::quorum_builder(urls.iter().map(String::as_str)),
        };
        // One connection is enough for the few requests of a command.
        builder = builder.pipelines(1).ttl(self.ttl);
        if let Some(prefix) = &self.prefix {
            builder = builder.prefix(prefix);
        }
        if let Some(library) = self.other_library {
            builder = builder.compatible_with(library);
        }
        for (name, set) in [
            (
                "LEASEHOLD_MAX_TTL",
                Builder::max_ttl as fn(Builder, Duration) -> Builder,
            ),
            ("LEASEHOLD_CONNECT_TIMEOUT", Builder::connect_timeout),
            ("LEASEHOLD_COMMAND_TIMEOUT", Builder::command_timeout),
            ("LEASEHOLD_OUTAGE_TIMEOUT", Builder::outage_timeout),
        ] {
            if let Some(value) = self.duration(name)? {
                builder = set(builder, value);
            }
        }
        if let Some(count) = self.values.get("LEASEHOLD_REPLICAS") {
            let count = count.parse();
            let count =
                count.map_err(|error| Failure::usage(format!("LEASEHOLD_REPLICAS: {error}")))?;
            builder = builder.replicas(count, REPLICAS_TIMEOUT);
        }
        if let Some(password) = self.values.get("LEASEHOLD_SENTINEL_PASSWORD") {
            builder =
                builder.sentinel_credentials(match self.values.get("LEASEHOLD_SENTINEL_USER") {
                    Some(user) => Credentials::user(user, password),
                    None => Credentials::password(password),
                });
        }
        match self.tls()? {
            Some(tls) => Ok(builder.tls(tls)),
            None => Ok(builder),
        }
    }

    /// The settings of TLS, if one of them is set.
    fn tls(&self) -> Result<Option<TlsConfig>, Failure> {
        let file = |name: &'static str| {
            let read = |path: &String| {
                fs::read(path).map_err(|error| Failure::usage(format!("{name}: {path}: {error}")))
            };
            self.values.get(name).map(read).transpose()
        };
        let (ca, name) = (
            file("LEASEHOLD_TLS_CA")?,
            self.values.get("LEASEHOLD_TLS_NAME"),
        );
        let (chain, key) = (file("LEASEHOLD_TLS_CERT")?, file("LEASEHOLD_TLS_KEY")?);
        if chain.is_some() != key.is_some() {
            return Err(Failure::usage(
                "LEASEHOLD_TLS_CERT and LEASEHOLD_TLS_KEY belong together: set both",
            ));
        }
        if ca.is_none() && name.is_none() && chain.is_none() {
            return Ok(None);
        }
        let mut tls = TlsConfig::new();
        if let Some(ca) = ca {
            tls = tls.ca_pem(ca);
        }
        if let Some(name) = name {
            tls = tls.server_name(name);
        }
        if let Some((chain, key)) = chain.zip(key) {
            tls = tls.client_certificate_pem(chain, key);
        }
        Ok(Some(tls))
    }
}

/// Refuses an address with a password among the arguments.
fn refuse_password(url: &str) -> Result<(), Failure> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    // A password may contain any character, so the login ends at the last `@`.
    let login = rest.rsplit_once('@').map_or("", |(login, _)| login);
    let in_login = login
        .split_once(':')
        .is_some_and(|(_, password)| !password.is_empty());
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let in_query = query.split('&').any(|part| part.starts_with("pass="));
    if in_login || in_query {
        return Err(Failure::usage(
            "--url contains a password, and other users of this machine can see arguments: put the address into the \
             variable LEASEHOLD_URL, or into a file for --config",
        ));
    }
    Ok(())
}

/// Reads a file of settings: lines of the form `NAME=value`, as systemd reads them from an `EnvironmentFile`.
fn read_file(path: &Path) -> Result<HashMap<&'static str, String>, Failure> {
    let text = fs::read_to_string(path);
    let text = text.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    parse_file(&text).map_err(|error| Failure::usage(format!("{}, {error}", path.display())))
}

/// Reads the text of a file of settings. An error shows only the number of the line, since the line may contain a
/// password.
fn parse_file(text: &str) -> Result<HashMap<&'static str, String>, String> {
    let mut values = HashMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        let (name, value) = line
            .split_once('=')
            .ok_or_else(|| format!("line {number}: it has no ="))?;
        let name = NAMES.into_iter().find(|known| *known == name.trim_end());
        let name = name
            .ok_or_else(|| format!("line {number}: there is no such setting; see docs/cli.md"))?;
        let value = value.trim();
        let unquoted = ['"', '\'']
            .into_iter()
            .find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
        values.insert(name, unquoted.unwrap_or(value).to_owned());
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_among_the_arguments_is_refused() {
        for url in [
            "redis://:s3cret@h",
            "redis://u:s3cret@h:6379/1",
            "rediss://u:p@w/rd@h",
            "redis+sentinel://:s3cret@10.0.0.7,10.0.0.8/mymaster",
            "redis+cluster://u:p@a,b",
            "unix:///run/redis.sock?user=u&pass=s3cret",
        ] {
            let failure = refuse_password(url).expect_err(url);
            assert_eq!(failure.code, crate::exit::USAGE);
            assert!(
                failure.message.contains("LEASEHOLD_URL") && !failure.message.contains("s3cret")
            );
        }
        for url in [
            "redis://h:6379/1",
            "redis://u@h:6379",
            "redis://u:@h",
            "unix:///run/a@b:c.sock?db=1",
        ] {
            assert!(refuse_password(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn a_file_has_variables() {
        let text = "# locks\nLEASEHOLD_URL = redis://:a=b#c@h\n\n;\nLEASEHOLD_PREFIX=\"a b\"\nLEASEHOLD_TTL='10s'\n";
        let values = parse_file(text).expect("it is valid");
        assert_eq!(values["LEASEHOLD_URL"], "redis://:a=b#c@h");
        assert_eq!(
            (&*values["LEASEHOLD_PREFIX"], &*values["LEASEHOLD_TTL"]),
            ("a b", "10s")
        );
        for (text, error) in [
            ("LEASEHOLD_URL=a\n\nredis://:s3cret@h", "line 3"),
            ("LEASEHOLD_URI=redis://:s3cret@h", "line 1"),
        ] {
            let found = parse_file(text).expect_err(text);
            assert!(
                found.contains(error) && !found.contains("s3cret"),
                "{found}"
            );
        }
    }
}
