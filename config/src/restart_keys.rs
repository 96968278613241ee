//! Keys that a reload does not change: their new values take effect at the next start of the process.

/// Key that takes effect at the next start, with all keys below it.
#[derive(Debug)]
pub struct RestartKey<C: 'static> {
    /// Name of the key.
    pub name: &'static str,
    /// Keys below it that a reload changes.
    pub reloads: &'static [&'static str],
    /// Whether the key differs between two configurations, apart from `reloads`.
    pub differs: fn(&C, &C) -> bool,
}

impl<C> RestartKey<C> {
    /// Returns a key that a reload changes in no part.
    pub const fn whole(name: &'static str, differs: fn(&C, &C) -> bool) -> Self {
        Self {
            name,
            reloads: &[],
            differs,
        }
    }
}

/// All such keys of a configuration. A reload warns of them, and the reference lists them.
#[derive(Debug)]
pub struct RestartKeys<C: 'static>(pub &'static [RestartKey<C>]);

impl<C> RestartKeys<C> {
    /// Returns the keys that differ between the configuration `began`, with which the process started, and `now`.
    pub fn changed(&self, began: &C, now: &C) -> Vec<&'static str> {
        let differs = self.0.iter().filter(|key| (key.differs)(began, now));
        differs.map(|key| key.name).collect()
    }

    /// Whether a change of this key takes effect at the next start. For a key with keys below it, this is about adding and
    /// removing it.
    pub fn contains(&self, key: &str) -> bool {
        let below = |name: &str| {
            let rest = key.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        let nearest = self.0.iter().filter(|entry| below(entry.name));
        let nearest = nearest.max_by_key(|entry| entry.name.len());
        nearest.is_some_and(|entry| !entry.reloads.iter().any(|name| below(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_decides() {
        let entry = |name, reloads| RestartKey::<()> {
            name,
            reloads,
            differs: |(), ()| false,
        };
        let entries: &'static [RestartKey<()>] = Box::leak(Box::new([
            entry("tunnel", &["tunnel.advertise", "tunnel.identity"]),
            entry("tunnel.identity", &["tunnel.identity.chain"]),
        ]));
        let keys = RestartKeys(entries);
        for (key, restart) in [
            ("tunnel", true),
            ("tunnel.listen", true),
            ("tunnel.advertise", false),
            ("tunnel.identity", true),
            ("tunnel.identity.signer", true),
            ("tunnel.identity.chain", false),
            ("tunnels", false),
            ("policy", false),
        ] {
            assert_eq!(keys.contains(key), restart, "{key}");
        }
    }
}
