//! The rights that an ACL user of leasehold needs, for each feature. This table is the source for `leasehold acl`, for
//! docs/redis.md, and for the integration tests, which also compile this file.

/// A part of the library that needs rights of its own.
pub struct Feature {
    /// The name on the command line.
    pub name: &'static str,
    /// The calls or settings that need it.
    pub title: &'static str,
    pub commands: &'static [Right],
    /// The effect if the user lacks these rights.
    pub without: &'static str,
    /// Whether the default rule contains the feature.
    pub is_usual: bool,
}

/// The right to call a command, or one of its subcommands.
pub struct Right {
    /// As ACL rules name it, in lower case: `client|tracking`.
    pub command: &'static str,
    /// The servers that accept a rule with this command. Other servers refuse the whole rule.
    pub since: Since,
}

pub type Version = (u32, u32);

/// A kind of server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Server {
    Redis(Version),
    Valkey(Version),
}

/// The servers that know a command.
#[derive(Clone, Copy)]
pub enum Since {
    /// Redis from this version on, and each Valkey that is compatible with it.
    Version(Version),
    /// Redis from this version on, and no Valkey.
    Redis(Version),
    /// Valkey from this version on, and no Redis.
    Valkey(Version),
}

/// The oldest Redis that leasehold supports.
pub const OLDEST: Version = (6, 2);

/// The version of Redis with which each Valkey is compatible.
const VALKEY_AS_REDIS: Version = (7, 2);

const fn right(command: &'static str) -> Right {
    Right {
        command,
        since: Since::Version(OLDEST),
    }
}

impl Right {
    /// Whether this server accepts a rule with the command.
    pub fn is_known_to(&self, server: Server) -> bool {
        match (self.since, server) {
            (Since::Version(since), Server::Valkey(_)) => since <= VALKEY_AS_REDIS,
            (Since::Version(since) | Since::Redis(since), Server::Redis(version))
            | (Since::Valkey(since), Server::Valkey(version)) => since <= version,
            (Since::Redis(_), Server::Valkey(_)) | (Since::Valkey(_), Server::Redis(_)) => false,
        }
    }
}

/// All features. A command may belong to several.
#[rustfmt::skip]
pub const FEATURES: &[Feature] = &[
    Feature {
        name: "locks",
        title: "locks, tickets, `force_unlock`",
        commands: &[
            right("evalsha"), right("eval"),
            right("time"), right("getrange"), right("mget"), right("exists"), right("type"), right("pttl"),
            right("set"), right("append"), right("pexpire"), right("del"),
            right("zadd"), right("zcard"), right("zcount"), right("zpopmin"), right("zrange"), right("zrank"),
            right("zrem"), right("zscore"),
        ],
        without: "`Denied`",
        is_usual: true,
    },
    Feature {
        name: "shares",
        title: "`Semaphore`, `RwLock`, besides `locks`",
        commands: &[
            right("pexpireat"),
            // Redis 6.2 does not have this command. Scripts use PTTL there.
            Right { command: "pexpiretime", since: Since::Version((7, 0)) },
        ],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "plain-acquires",
        title: "free locks without a script, besides `locks`",
        commands: &[right("multi"), right("exec")],
        without: "a script acquires all locks, which costs Redis more time (`plain_acquires_refused`)",
        is_usual: true,
    },
    Feature {
        name: "plain-releases",
        title: "releases without a script, besides `locks`",
        commands: &[
            Right { command: "delex", since: Since::Redis((8, 4)) },
            Right { command: "delifeq", since: Since::Valkey((9, 0)) },
        ],
        without: "a script releases all locks, which costs Redis more time",
        is_usual: true,
    },
    Feature {
        name: "script-cache",
        title: "connections that send only missing scripts",
        commands: &[right("script|exists"), right("script|load")],
        without: "each connection sends all scripts, some 85 KB; without `script\\|load`, the first calls send them",
        is_usual: true,
    },
    Feature {
        name: "notifications",
        title: "notifications",
        commands: &[
            right("getrange"), right("ping"), right("client|tracking"), right("subscribe"), right("publish"),
            right("pubsub|numsub"),
        ],
        without: "waiters poll; without `client\\|tracking`, they are notified of grants, but only renewals find lost \
                  locks (`notifications_refused`)",
        is_usual: true,
    },
    Feature {
        name: "names",
        title: "names of connections",
        commands: &[
            right("client|setname"),
            Right { command: "client|setinfo", since: Since::Version((7, 2)) },
        ],
        without: "`CLIENT LIST` shows only the name of the notification connection",
        is_usual: true,
    },
    Feature {
        name: "fenced-values",
        title: "`FencedValue`, and `Once` and `Election` besides `locks`",
        commands: &[
            right("evalsha"), right("eval"),
            right("hget"), right("hset"), right("hstrlen"), right("hdel"), right("pexpire"), right("exists"),
            right("type"),
        ],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "transactions",
        title: "`transaction`, besides its own commands on your keys",
        commands: &[right("watch"), right("get"), right("multi"), right("exec"), right("unwatch")],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "replicas",
        title: "`replicas`, besides `locks`",
        commands: &[right("wait")],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "python-redis-lock",
        title: "`OtherLibrary::PythonRedisLock`, besides `locks`; the keys `~lock-signal:*`, too",
        commands: &[right("lpush")],
        without: "a release frees the key but wakes no waiter of python-redis-lock, and `unlock` returns `Unconfirmed`. Without the right to the keys, releases are refused",
        is_usual: false,
    },
    Feature {
        name: "cluster",
        title: "a Redis Cluster, besides `locks`",
        commands: &[right("cluster|slots"), right("asking")],
        without: "`Denied`: without `cluster\\|slots` at once, without `asking` while a slot moves",
        is_usual: false,
    },
    Feature {
        name: "shard-channels",
        title: "notifications on a Redis Cluster, besides `notifications`",
        commands: &[
            Right { command: "ssubscribe", since: Since::Version((7, 0)) },
            Right { command: "spublish", since: Since::Version((7, 0)) },
            // Redis 6.2 does not have this subcommand, but checks the right to it.
            right("pubsub|shardnumsub"),
        ],
        without: "`publish` is used, and the nodes send each message to all nodes",
        is_usual: false,
    },
    Feature {
        name: "redisson",
        title: "`OtherLibrary::Redisson`, in place of `locks`. Also the keys `~redisson_lock_*` and the channels \
                `&redisson_lock__channel:*`",
        commands: &[
            right("evalsha"), right("eval"),
            right("time"), right("exists"), right("type"), right("pttl"), right("pexpire"), right("del"),
            right("hset"), right("hdel"), right("hexists"), right("hkeys"), right("hlen"),
            right("publish"), right("lindex"),
            // The counter of tokens: that of Redisson for fenced locks, otherwise the fence counter.
            right("incr"), right("get"), right("zadd"), right("zscore"),
        ],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "inspect",
        title: "only `inspect` and `is_locked`",
        commands: &[
            right("evalsha"), right("eval"),
            right("getrange"), right("exists"), right("type"), right("pttl"), right("zcard"), right("zcount"),
            right("zrange"),
        ],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "list",
        title: "`Client::locks`, besides `inspect`",
        commands: &[right("scan")],
        without: "`Denied`",
        is_usual: false,
    },
    Feature {
        name: "ping",
        title: "`Client::ping`",
        commands: &[right("ping")],
        without: "`Denied`",
        is_usual: true,
    },
    Feature {
        name: "environment-check",
        title: "`check_environment`, and the check after the first connection",
        commands: &[right("info"), right("config|get")],
        without: "findings name what was not checked",
        is_usual: false,
    },
    Feature {
        name: "database",
        title: "a database other than 0",
        commands: &[right("select")],
        without: "`Denied`",
        is_usual: false,
    },
];

/// The rights that a client needs at sentinels. Sentinels have users of their own.
pub const AT_SENTINELS: &[Feature] = &[
    Feature {
        name: "primary",
        title: "the address of the primary",
        commands: &[right("sentinel|get-master-addr-by-name")],
        without: "`Denied`",
        is_usual: true,
    },
    Feature {
        name: "fail-overs",
        title: "messages about fail-overs, on the channel `+switch-master`",
        commands: &[right("subscribe")],
        without: "the client notices a fail-over within 5 s, or when a connection fails",
        is_usual: true,
    },
    Feature {
        name: "epochs",
        title: "the number of the last fail-over",
        commands: &[right("sentinel|master")],
        without: "the client does not recognize outdated answers",
        is_usual: true,
    },
    Feature {
        name: "other-sentinels",
        title: "the other sentinels of the group",
        commands: &[right("sentinel|sentinels")],
        without: "the client uses only the sentinels of the URL",
        is_usual: true,
    },
];

/// The features with these names; `usual` and `all` name several. Fails with the first unknown name.
pub fn features<'a>(names: &[&'a str]) -> Result<Vec<&'static Feature>, &'a str> {
    let mut features = Vec::new();
    for name in names {
        match *name {
            "usual" => features.extend(usual()),
            "all" => features.extend(FEATURES),
            name => {
                let found = FEATURES.iter().find(|feature| feature.name == name);
                features.push(found.ok_or(name)?);
            }
        }
    }
    Ok(features)
}

/// The features of the default rule.
pub fn usual() -> Vec<&'static Feature> {
    FEATURES.iter().filter(|feature| feature.is_usual).collect()
}

/// The commands of `features` that `server` knows, sorted and without duplicates.
pub fn commands(features: &[&Feature], server: Server) -> Vec<&'static str> {
    let rights = features.iter().flat_map(|feature| feature.commands);
    let known = rights.filter(|right| right.is_known_to(server));
    let mut commands: Vec<&str> = known.map(|right| right.command).collect();
    commands.sort_unstable();
    commands.dedup();
    commands
}

/// The words of a rule that allows the keys and channels of `prefix`, and `commands`. The rule forbids everything else.
/// (On Redis 6.2, it has to forbid channels, since new users may use all of them.)
pub fn rule(prefix: &str, commands: &[&str]) -> Vec<String> {
    let prefix = pattern(prefix);
    let mut words = vec![
        "resetkeys".to_owned(),
        format!("~{prefix}*"),
        "resetchannels".to_owned(),
        format!("&{prefix}~to:*"),
        "-@all".to_owned(),
    ];
    words.extend(commands.iter().map(|command| format!("+{command}")));
    words
}

/// The words of a rule for a user at the sentinels.
pub fn rule_at_sentinels(commands: &[&str]) -> Vec<String> {
    let words = ["resetkeys", "resetchannels", CHANNEL_AT_SENTINELS, "-@all"];
    let mut words: Vec<String> = words.map(str::to_owned).to_vec();
    words.extend(commands.iter().map(|command| format!("+{command}")));
    words
}

/// The right to the messages about fail-overs.
pub const CHANNEL_AT_SENTINELS: &str = "&+switch-master";

/// The pattern that matches `prefix`. It has `?` in place of blanks and quotes, which a rule cannot contain.
fn pattern(prefix: &str) -> String {
    let mut pattern = String::new();
    for c in prefix.chars() {
        match c {
            '*' | '?' | '[' | ']' | '\\' => pattern.extend(['\\', c]),
            '"' | '\'' => pattern.push('?'),
            c if c.is_whitespace() => pattern.extend(std::iter::repeat_n('?', c.len_utf8())),
            c => pattern.push(c),
        }
    }
    pattern
}

/// The table of docs/redis.md, and of `leasehold acl --list`.
pub fn table() -> String {
    let mut table =
        "| `--features` | for | commands | without them |\n|---|---|---|---|\n".to_owned();
    for feature in FEATURES {
        let star = if feature.is_usual { "" } else { " *" };
        table += &format!("| `{}`{star} {}", feature.name, columns(feature));
    }
    table
}

/// The table of docs/topologies.md.
pub fn table_at_sentinels() -> String {
    let mut table = "| for | commands | without them |\n|---|---|---|\n".to_owned();
    table.extend(AT_SENTINELS.iter().map(columns));
    table
}

/// A row of the table: the purpose of a feature, its commands, and the effect without them.
fn columns(feature: &Feature) -> String {
    let name = |right: &Right| {
        let name = format!("`{}`", right.command.replace('|', "\\|"));
        match right.since {
            Since::Version(OLDEST) => name,
            Since::Version((major, minor)) => format!("{name} (from {major}.{minor})"),
            Since::Redis((major, minor)) => format!("{name} (Redis from {major}.{minor})"),
            Since::Valkey((major, minor)) => format!("{name} (Valkey from {major}.{minor})"),
        }
    };
    let commands: Vec<String> = feature.commands.iter().map(name).collect();
    format!(
        "| {} | {} | {} |\n",
        feature.title,
        commands.join(", "),
        feature.without
    )
}
