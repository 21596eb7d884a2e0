-- What docker-compose.yml makes in PostgreSQL besides the database app: nobody who connects afterwards is superuser.
-- app owns the database: services, and outflow init. outflow is for outflow run, which needs no right on any table.
CREATE ROLE app LOGIN REPLICATION PASSWORD 'app';
ALTER DATABASE app OWNER TO app;
CREATE ROLE outflow LOGIN REPLICATION PASSWORD 'outflow';
REVOKE ALL ON DATABASE app FROM PUBLIC;
GRANT CONNECT ON DATABASE app TO outflow;
